"""Ranges of an array, beside the copy engine, warps that gather the same rows, and numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.pipelines.base import Bench, Data

__all__ = ["measure"]

_ROW_BYTES = 4096
_OF_CEILING = 0.95
_TO_HOST = 4  # ranges: memory of the host is slower


def measure(bench: Bench, data: Data, storage: str, batch: int, link: float) -> None:
    """Measure ranges of `batch` bytes; `link` is what the copy engine moves, 0 without one."""
    with data.open(storage, _ROW_BYTES) as array:
        rows = min(batch, data.nbytes) // _ROW_BYTES
        parts = [slice(k, k + rows) for k in range(0, len(array) - rows + 1, rows)]
        _to_the_device(bench, data, array, parts, f"{storage}, ranges", link)
        _to_the_host(bench, data, array, parts[:_TO_HOST], f"{storage}, x[a:b]")


def _to_the_device(
    bench: Bench, data: Data, array: fw.Array, parts: list[slice], label: str, link: float
) -> None:
    torch, rows = bench.torch, parts[0].stop
    out = torch.empty((rows, _ROW_BYTES // 4), dtype=torch.int32, device=bench.place)
    lists = [torch.arange(part.start, part.stop, device=bench.place) for part in parts]
    ways: dict[str, list[Any]] = {"ranges": parts, "lists": lists}
    rates, kernels = {}, "warps" if bench.on_gpu else "threads"

    def gather(chosen: list[Any]) -> None:
        for which in chosen:
            array.gather(which, out=out, stream=bench.stream)

    for name, chosen in ways.items():
        out.zero_()
        cost = bench.median_cost(partial(gather, chosen))
        right = bench.rows_right(out, lists[-1])
        rates[name] = len(parts) * rows * _ROW_BYTES / cost.seconds / 1e9, right
        if name == "ranges":
            way = "copy engine" if array.stats.bytes_copied else kernels
    (ours, right), (listed, listed_right) = rates["ranges"], rates["lists"]
    bases = [(f"{kernels}, the same rows as a list", listed, 1.0)]
    if link:
        bases.insert(0, ("copy engine, pinned memory", link, _OF_CEILING))
    for against, base, target in bases:
        bench.add(
            f"{label}: gather ({way})", ours, "GB/s", (against, base), target,
            right and listed_right, note=array.explain().ranges, footprint=data.nbytes,
        )  # fmt: skip


def _to_the_host(bench: Bench, data: Data, array: fw.Array, parts: list[slice], label: str) -> None:
    """Measure slices, whose rows go to new arrays of numpy: through the GPU, if there is one."""
    shape = (len(array), _ROW_BYTES // 4)
    if label.startswith("memory"):
        plain = data.memory.reshape(shape)
    else:
        plain = np.memmap(data.path, np.int32, "r", shape=shape)
    ours = bench.median_cost(lambda: [array[part] for part in parts]).seconds
    numpy = bench.median_cost(lambda: [np.array(plain[part]) for part in parts]).seconds
    right = bool((array[parts[-1]] == plain[parts[-1]]).all())
    gb = len(parts) * parts[0].stop * _ROW_BYTES / 1e9
    bench.add(
        label, gb / ours, "GB/s", ("numpy, a copy of the slice", gb / numpy), 0.0, right,
        footprint=data.nbytes,
    )  # fmt: skip
