"""Adding two vectors larger than memory: BaM's section 5.4, where every byte moves once.

Ours reads and writes on demand; the baseline moves tiles with the copy engines, two of them in
turn, so that the results of one leave while the next one comes. Both work on the same pinned host
memory, and end when the sums are there. Beside them stand warps that add in that memory without a
cache: what warps move by themselves. On the CPU device the baseline is numpy, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp.bench.report import Report, Row, machine_facts
from flashwarp.bench.timing import in_turns, wall_seconds
from flashwarp.compiling import Program
from flashwarp.device import CudaDevice, Device, Stream, resolve

__all__ = ["KERNELS", "run"]

KERNELS = Path(__file__).with_name("vectoradd.cu")

_ELEMENT_BYTES = 8
# BaM's baseline has five tiles of its four billion elements.
_PAPER_TILES = 5
_TURNS_OF_TILES = 2
_IN_PLACE = "warps in place, without a cache"


def run(
    device: str | None,
    gib: Annotated[float, "Size of each of the three vectors in GiB."] = 0.0,
    cache: Annotated[str, "Cache of all three; 1 GiB on a GPU."] = "",
    line: Annotated[str, "Line of the cache; 16 KiB on a GPU."] = "",
    runs: Annotated[int, "How often each way has its turn."] = 3,
) -> Report:
    """Add through the cache, and tile by tile."""
    where = resolve(device)
    on_gpu = isinstance(where, CudaDevice)
    gib = gib or (2.0 if on_gpu else 0.0625)
    cache = cache or ("1 GiB" if on_gpu else "16 MiB")
    line = line or ("16 KiB" if on_gpu else "4 KiB")
    report = Report(
        title="Vector addition",
        settings={"vector_gib": gib, "cache": cache, "line": line},
        machine=machine_facts(where.describe()),
    )
    n = int(gib * 2**30) // _ELEMENT_BYTES
    a = np.arange(n, dtype=np.float64)
    b = 2 * a
    c = np.zeros(n)
    with ExitStack() as stack:
        ours = _Ours(stack, where, (a, b, c), cache, line)
        if isinstance(where, CudaDevice):
            tiled: Callable[[int], Any] = _CopyEngines(stack, where, ours.program, (a, b, c)).add
        else:
            tiled = partial(_numpy_tiles, (a, b, c))
        tiles = {"5 tiles": -(-n // _PAPER_TILES), "tiles of 64 MiB": (64 << 20) // _ELEMENT_BYTES}
        ways: dict[str, Callable[[], Any]] = {
            "ours": partial(ours.add, eager=True),
            "ours, written back when frames are needed": partial(ours.add, eager=False),
            **{name: partial(tiled, size) for name, size in tiles.items()},
        }
        if on_gpu:
            ways[_IN_PLACE] = ours.add_in_place
        right: dict[str, bool] = {}
        seconds = in_turns(
            {name: partial(_measure, name, way, (a, c), right) for name, way in ways.items()}, runs
        )
    gb = 3 * c.nbytes / 1e9
    best = min(tiles, key=lambda name: seconds[name])
    for name in (*tiles, *({_IN_PLACE} & set(ways))):
        told = name if name == _IN_PLACE else f"tiled: {name}"
        report.add(Row(told, gb / seconds[name], "GB/s", checked=right[name]))
    for name in ("ours", "ours, written back when frames are needed"):
        for against in dict.fromkeys(("5 tiles", best, *({_IN_PLACE} & set(ways)))):
            report.add(
                Row(
                    name,
                    gb / seconds[name],
                    "GB/s",
                    against,
                    gb / seconds[against],
                    1.0 if name == "ours" and against in tiles else 0.0,
                    right[name],
                    paper="0.66 (BaM 5.4)" if against == "5 tiles" else "",
                )
            )
    return report


Vectors = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def _measure(
    name: str,
    add: Callable[[], Any],
    vectors: tuple[NDArray[np.float64], NDArray[np.float64]],
    right: dict[str, bool],
) -> float:
    a, c = vectors
    c[:] = -1
    seconds = wall_seconds(add)
    # a counts from 0 and b is its double: all exact.
    right[name] = right.get(name, True) and bool(np.array_equal(c, 3 * a))
    return seconds


class _Ours:
    """Three arrays on one cache, and the kernel that adds them."""

    def __init__(
        self, stack: ExitStack, device: Device, vectors: Vectors, cache: str, line: str
    ) -> None:
        self.program: Program = fw.compile(KERNELS, device)
        self._device = device
        self._vectors = vectors
        shared = stack.enter_context(fw.Cache(cache, line=line, device=device))
        self._arrays = [
            stack.enter_context(fw.from_storage(fw.storage.Memory(vector), "float64", cache=shared))
            for vector in vectors
        ]
        self._line = shared.line_bytes // _ELEMENT_BYTES
        self._lines = -(-len(vectors[0]) // self._line)
        warps = self._warps_max(device)
        self._scratch = stack.enter_context(device.allocate(warps * shared.line_bytes))

    @staticmethod
    def _warps_max(device: Device) -> int:
        # 2048 threads are the most that a multiprocessor of any GPU holds.
        if isinstance(device, CudaDevice):
            return device.context.multiprocessors * 64
        return 64

    def add(self, eager: bool) -> None:
        """Add, with nothing in the cache at the start and all in the storage at the end."""
        *_, c = self._arrays
        for array in self._arrays:
            array.drop_cache()
        self.program["vector_add"](
            *self._arrays, self._scratch, self._line, 0, int(eager), warps=self._lines
        )
        for array in self._arrays:
            array.synchronize()
        c.flush()

    def add_in_place(self) -> None:
        """Add in pinned memory by warps, which is what ours could be at best."""
        kernel, n = self.program["add_in_place"], len(self._vectors[0])
        addresses = [vector.ctypes.data for vector in self._vectors]
        # Vectors are a whole number of pairs, but for a last element.
        kernel(*addresses, n // 2, warps=-(-n // 64))
        self._device.synchronize()
        a, b, c = self._vectors
        c[n // 2 * 2 :] = a[n // 2 * 2 :] + b[n // 2 * 2 :]


class _CopyEngines:
    """Tiles through device memory: two in turn, each on a stream of its own."""

    def __init__(
        self, stack: ExitStack, device: CudaDevice, program: Program, vectors: Vectors
    ) -> None:
        self._device = device
        self._program = program
        self._vectors = vectors
        self._stack = stack
        self._streams = [Stream(device.context.create_stream()) for _ in range(_TURNS_OF_TILES)]
        for stream in self._streams:
            stack.callback(device.context.destroy_stream, stream.handle)
        self._room: dict[int, list[Any]] = {}

    def add(self, tile: int) -> None:
        """Copy in, add, copy out, tile after tile."""
        if tile not in self._room:
            self._room[tile] = [
                [self._stack.enter_context(self._device.allocate(8 * tile)) for _ in range(3)]
                for _ in self._streams
            ]
            self._device.synchronize()
        context, total = self._device.context, len(self._vectors[0])
        for number, first in enumerate(range(0, total, tile)):
            turn = number % _TURNS_OF_TILES
            stream, (a, b, c) = self._streams[turn], self._room[tile][turn]
            n = min(tile, total - first)
            host = [vector.ctypes.data + 8 * first for vector in self._vectors]
            context.copy_to_device(a.address, host[0], 8 * n, stream.handle)
            context.copy_to_device(b.address, host[1], 8 * n, stream.handle)
            self._program["add_tile"](a, b, c, n, warps=-(-n // 32), stream=stream)
            context.copy_to_host(host[2], c.address, 8 * n, stream.handle)
        for stream in self._streams:
            self._device.synchronize(stream)


def _numpy_tiles(vectors: Vectors, tile: int) -> None:
    a, b, c = vectors
    for first in range(0, len(a), tile):
        part = slice(first, first + tile)
        np.add(a[part], b[part], out=c[part])
