"""Adding two vectors larger than memory: BaM's section 5.4, where every byte moves once.

flashwarp reads and writes on demand. The baseline moves tiles with the copy engines, so that the
sums of one tile leave while the next one arrives. A third way, warps that add in place without a
cache, shows what warps alone can move. All work on the same pinned host memory and end when the
sums are there. Then the first two work on the same files, and end when the sums are durable. On the
CPU device, the baseline adds with numpy, tile by tile.
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
from benchmarks.arrays import vectoradd_files
from benchmarks.arrays.vectoradd_ours import ELEMENT_BYTES, KERNELS, TILE_BYTES, Ours, Tiled
from benchmarks.base import Record, by_kind
from flashwarp.device import CudaDevice, Device, Stream, resolve
from flashwarp.errors import ArgumentError
from flashwarp.probe.timing import in_turns, wall_seconds
from flashwarp.program.compiling import Program

__all__ = ["KERNELS", "run"]

# BaM's baseline has five tiles of its four billion elements.
_PAPER_TILES = 5
_TURNS_OF_TILES = 2
_IN_PLACE = "warps in place, without a cache"
_OURS = "flashwarp"
_LATER = "flashwarp, written back when frames are needed"
_TILED = {
    "flashwarp, tiles of pipelines": TILE_BYTES,
    "flashwarp, tiles of pipelines of 64 MiB": 64 << 20,
}
_STORAGES = {"memory": ("memory",), "file": ("file",), "both": ("memory", "file")}


def run(
    device: str | None,
    folder: Path,
    gib: Annotated[float, "Size of each of the three vectors in GiB."] = 0.0,
    cache: Annotated[str, "Cache of all three; 1 GiB on a GPU."] = "",
    line: Annotated[str, "Line of the cache; 16 KiB on a GPU."] = "",
    storage: Annotated[str, "Where the vectors are: memory, file or both."] = "both",
    tiles: Annotated[str, "Tiles of the vectors in files, with commas."] = "16 MiB,64 MiB",
    runs: Annotated[int, "How often each way has its turn."] = 3,
) -> Record:
    """Add through the cache, and tile by tile."""
    if storage not in _STORAGES:
        raise ArgumentError(f"storage is {', '.join(_STORAGES)}, not {storage}")
    sizes = vectoradd_files.tile_sizes(tiles)
    where = resolve(device)
    gib = by_kind(where, gib, 2.0, 0.0625)
    cache = by_kind(where, cache, "1 GiB", "16 MiB")
    line = by_kind(where, line, "16 KiB", "4 KiB")
    report = Record(
        title="Vector addition",
        device=where.describe(),
        settings={
            "vector_gib": gib,
            "cache": cache,
            "line": line,
            "storage": storage,
            "tiles": tiles,
            "runs": runs,
        },
        seeds={},
    )
    nbytes = int(gib * 2**30)
    program = fw.compile(KERNELS, where)
    if "memory" in _STORAGES[storage]:
        _in_memory(report, where, program, nbytes, cache=cache, line=line, runs=runs)
    if "file" in _STORAGES[storage]:
        vectoradd_files.measure(
            report, where, program, folder, nbytes, cache=cache, line=line, tiles=sizes, runs=runs
        )
    return report


def _in_memory(
    report: Record,
    device: Device,
    program: Program,
    nbytes: int,
    *,
    cache: str,
    line: str,
    runs: int,
) -> None:
    n = nbytes // ELEMENT_BYTES
    a = np.arange(n, dtype=np.float64)
    b = 2 * a
    c = np.zeros(n)
    vectors = (a, b, c)
    with ExitStack() as stack:
        shared = stack.enter_context(fw.Cache(cache, line=line, device=device))
        arrays = [
            stack.enter_context(fw.open(fw.storage.Memory(vector), "r+", "float64", cache=shared))
            for vector in vectors
        ]
        ours = Ours(stack, device, program, arrays)
        pipelined = {
            name: Tiled(stack, device, program, arrays, size) for name, size in _TILED.items()
        }
        if isinstance(device, CudaDevice):
            tiled: Callable[[int], Any] = _CopyEngines(stack, device, program, vectors).add
        else:
            tiled = partial(_numpy_tiles, vectors)
        tiles = {"5 tiles": -(-n // _PAPER_TILES), "tiles of 64 MiB": (64 << 20) // ELEMENT_BYTES}
        ways: dict[str, Callable[[], Any]] = {
            _OURS: partial(_add_and_flush, ours, eager=True),
            _LATER: partial(_add_and_flush, ours, eager=False),
            **{name: each.add_and_flush for name, each in pipelined.items()},
            **{name: partial(tiled, size) for name, size in tiles.items()},
        }
        if isinstance(device, CudaDevice):
            ways[_IN_PLACE] = partial(_add_in_place, device, program, vectors)
        right: dict[str, bool] = {}
        seconds = in_turns(
            {name: partial(_measure, name, way, (a, c), right) for name, way in ways.items()}, runs
        )
    gb = 3 * c.nbytes / 1e9
    best = min(tiles, key=lambda name: seconds[name])
    for name in (*tiles, *({_IN_PLACE} & set(ways))):
        told = f"host memory: {'' if name == _IN_PLACE else 'tiled: '}{name}"
        report.row(told, gb / seconds[name], "GB/s", checked=right[name], footprint=3 * c.nbytes)
    for name in (_OURS, _LATER, *_TILED):
        for against in dict.fromkeys(("5 tiles", best, *({_IN_PLACE} & set(ways)))):
            report.row(
                f"host memory: {name}",
                gb / seconds[name],
                "GB/s",
                against,
                gb / seconds[against],
                1.0 if name != _LATER and against in tiles else 0.0,
                right[name],
                paper="0.66 (BaM 5.4)" if against == "5 tiles" else "",
                footprint=3 * c.nbytes,
            )


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


def _add_and_flush(ours: Ours, eager: bool) -> None:
    ours.add(eager)
    ours.flush()


def _add_in_place(device: Device, program: Program, vectors: Vectors) -> None:
    """Add in pinned memory by warps, without a cache."""
    kernel, n = program["add_in_place"], len(vectors[0])
    addresses = [vector.ctypes.data for vector in vectors]
    # Vectors are a whole number of pairs, but for a last element.
    kernel(*addresses, n // 2, warps=-(-n // 64))
    device.synchronize()
    a, b, c = vectors
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
            stack.callback(device.context.releasing("cuStreamDestroy", stream.handle))
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
            context.call("cuMemcpyHtoDAsync", a.address, host[0], 8 * n, stream.handle)
            context.call("cuMemcpyHtoDAsync", b.address, host[1], 8 * n, stream.handle)
            self._program["add_tile"](a, b, c, n, warps=-(-n // 32), stream=stream)
            context.call("cuMemcpyDtoHAsync", host[2], c.address, 8 * n, stream.handle)
        for stream in self._streams:
            self._device.synchronize(stream)


def _numpy_tiles(vectors: Vectors, tile: int) -> None:
    a, b, c = vectors
    for first in range(0, len(a), tile):
        part = slice(first, first + tile)
        np.add(a[part], b[part], out=c[part])
