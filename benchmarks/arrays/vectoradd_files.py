"""The vectors in files, warm in the page cache: inputs are read from them, sums written to one.

The baseline is a pipeline of tiles: a pool of threads reads the parts of one tile into pinned
staging memory while copy engines and a kernel add the tile before it, and the sums of the tile
before that are written. Both ways write through the page cache, begin with an output file of holes,
and end when the sums are durable.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.arrays.vectoradd_ours import ELEMENT_BYTES, Ours, Tiled
from benchmarks.base import Record, listed
from flashwarp import config
from flashwarp.config import parse_bytes
from flashwarp.device import CudaDevice, Device, DeviceMemory, OwnedStream
from flashwarp.errors import ArgumentError
from flashwarp.probe.timing import in_turns, wall_seconds
from flashwarp.program.compiling import Program

__all__ = ["measure", "tile_sizes"]

_PAGE_BYTES = 4096
_THREADS_MAX = 16
# One tile is read, one is added and one is written at a time.
_SLOTS = 3
# Of each vector of a tile: two inputs keep 16 threads busy.
_PIECES = 8
_CHECKED_AT_A_TIME = 1 << 20
# What our ways are called, and the least part of the tiled pipeline that this project accepts.
_OURS = {
    "ours": ("files: flashwarp", 1.0),
    "pipelines": ("files: flashwarp, tiles of pipelines", 0.95),
}


def tile_sizes(tiles: str) -> dict[str, int]:
    """Return the bytes of each size that is named, with commas between."""
    sizes = {name: parse_bytes(name) for name in listed("tiles", tiles)}
    if small := [name for name, nbytes in sizes.items() if nbytes < _PAGE_BYTES]:
        raise ArgumentError(f"tiles={tiles!r}: {', '.join(small)} is less than a page of 4 KiB")
    return {name: nbytes // _PAGE_BYTES * _PAGE_BYTES for name, nbytes in sizes.items()}


def measure(
    report: Record,
    device: Device,
    program: Program,
    folder: Path,
    nbytes: int,
    *,
    cache: str,
    line: str,
    tiles: dict[str, int],
    runs: int,
) -> None:
    """Add vectors of `nbytes` each through our arrays, and in tiles of each size."""
    nbytes = nbytes // ELEMENT_BYTES * ELEMENT_BYTES
    threads = min(_THREADS_MAX, config.cores())
    with ExitStack() as stack:
        files = _Files(stack, folder, nbytes)
        shared = stack.enter_context(fw.Cache(cache, line=line, device=device))
        arrays = files.open_arrays(stack, shared)
        ours = Ours(stack, device, program, arrays)
        room = min(nbytes, max(tiles.values()))
        adder: _Adder = (
            _Gpu(stack, device, program, room) if isinstance(device, CudaDevice) else _Numpy()
        )
        tiled = _Tiles(stack, device, files, adder, room, threads)
        ways = {name: _Way(partial(tiled.add, size), files.sync) for name, size in tiles.items()}
        ways["ours"] = _Way(partial(ours.add, eager=True), ours.flush)
        pipelined = Tiled(stack, device, program, arrays)
        ways["pipelines"] = _Way(pipelined.add, pipelined.flush)
        seconds = in_turns(
            {name: partial(way.measure, files, tiled.pool) for name, way in ways.items()}, runs
        )
        told = [array.explain() for array in arrays]
    report.settings["files"] = {
        "threads": threads,
        "slots": _SLOTS,
        "paths": {name: f"{one.path}: {one.reason}" for name, one in zip("abc", told, strict=True)},
        "seconds_to_be_durable": {name: way.to_be_durable for name, way in ways.items()},
    }
    _tell(report, 3 * nbytes, ways, seconds, threads, [one.path for one in told])


def _tell(
    report: Record,
    nbytes: int,
    ways: dict[str, _Way],
    seconds: dict[str, float],
    threads: int,
    paths: Sequence[str],
) -> None:
    tiled = [name for name in ways if name not in _OURS]
    gb = nbytes / 1e9
    for name in tiled:
        report.row(
            f"files: tiled, {name}",
            gb / seconds[name],
            "GB/s",
            checked=ways[name].right,
            note=f"page cache, {threads} threads; {ways[name].ending(seconds[name])}",
            footprint=nbytes,
        )
    best = min(tiled, key=lambda name: seconds[name])
    for name, (told, target) in _OURS.items():
        report.row(
            told,
            gb / seconds[name],
            "GB/s",
            f"tiled, {best}",
            gb / seconds[best],
            target,
            ways[name].right,
            paper="0.66 (BaM 5.4)",
            note=f"page cache; data paths: inputs {paths[0]}, output {paths[2]}; "
            + ways[name].ending(seconds[name]),
            footprint=nbytes,
        )


@dataclass
class _Way:
    """One way to add: first the sums, then what makes them durable."""

    add: Callable[[], object]
    make_durable: Callable[[], object]
    right: bool = True
    to_be_durable: list[float] = field(default_factory=list)

    def measure(self, files: _Files, pool: ThreadPoolExecutor) -> float:
        """Return the seconds of both, with no sums in the file at the start."""
        files.empty_output()
        adding = wall_seconds(self.add)
        ending = wall_seconds(self.make_durable)
        self.to_be_durable.append(ending)
        self.right = files.right(pool) and self.right
        return adding + ending

    def ending(self, seconds: float) -> str:
        """Tell the share of `seconds` after the last sum; the first run was for warming up."""
        ending = median(self.to_be_durable[1:])
        return f"{ending:.2g} s of {seconds:.2g} s to be durable"


class _Files:
    """Two inputs in the page cache, and the output: plain doubles, opened for the baseline."""

    def __init__(self, stack: ExitStack, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._paths = [folder / f"{name}.float64" for name in "abc"]
        # From 1 on, so that no sum is what a hole reads as; and all exact.
        counter = np.arange(1, nbytes // ELEMENT_BYTES + 1, dtype=np.float64)
        for path, factor in zip(self._paths[:2], (1, 2), strict=True):
            (counter * factor).tofile(path)
            # On the disk before anything is timed, which would share the disk with it otherwise.
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self._paths[2].touch()
        self.handles = [os.open(path, os.O_RDWR) for path in self._paths]
        for handle in self.handles:
            stack.callback(os.close, handle)
        self.empty_output()

    def open_arrays(self, stack: ExitStack, cache: fw.Cache) -> list[fw.Array]:
        """Open the inputs for reading, as they come, and the output for writing."""
        a, b, c = self._paths
        arrays = [fw.open(path, dtype="float64", cache=cache) for path in (a, b)]
        # Nothing of the output is in the page cache yet, so it would be written past it. The
        # baseline writes through it.
        arrays.append(fw.open(c, "r+", dtype="float64", cache=cache, o_direct=False))
        for array in arrays:
            stack.enter_context(array)
        return arrays

    def empty_output(self) -> None:
        """Leave nothing in the output but a hole of its size."""
        os.ftruncate(self.handles[2], 0)
        os.ftruncate(self.handles[2], self.nbytes)

    def sync(self) -> None:
        """Make the output durable, by the call that `Array.flush` ends with."""
        os.fdatasync(self.handles[2])

    def right(self, pool: ThreadPoolExecutor) -> bool:
        """Tell whether the output holds every sum."""
        parts = range(0, self.nbytes // ELEMENT_BYTES, _CHECKED_AT_A_TIME)
        return all(list(pool.map(self._right_from, parts)))

    def _right_from(self, first: int) -> bool:
        n = min(_CHECKED_AT_A_TIME, self.nbytes // ELEMENT_BYTES - first)
        found = np.fromfile(self._paths[2], np.float64, n, offset=ELEMENT_BYTES * first)
        expected = 3 * np.arange(first + 1, first + n + 1, dtype=np.float64)
        return bool(np.array_equal(found, expected))


class _Adder(ABC):
    """Adds a tile that is in staging memory, and leaves the sums there."""

    @abstractmethod
    def begin(self, slot: int, staging: Sequence[DeviceMemory], nbytes: int) -> None:
        """Begin with the tile of a slot: two inputs and the sums."""

    @abstractmethod
    def finish(self, slot: int) -> None:
        """Wait until the sums of a slot are in its staging memory."""


class _Gpu(_Adder):
    """Copy engines and a kernel, each slot on a stream and in device memory of its own."""

    def __init__(self, stack: ExitStack, device: CudaDevice, program: Program, room: int) -> None:
        self._device = device
        self._kernel = program["add_tile"]
        self._tiles = [
            [stack.enter_context(device.allocate(room)) for _ in "abc"] for _ in range(_SLOTS)
        ]
        self._streams: list[OwnedStream] = [
            stack.enter_context(device.create_stream()) for _ in range(_SLOTS)
        ]

    def begin(self, slot: int, staging: Sequence[DeviceMemory], nbytes: int) -> None:
        context, stream = self._device.context, self._streams[slot]
        a, b, c = self._tiles[slot]
        n = nbytes // ELEMENT_BYTES
        context.call("cuMemcpyHtoDAsync", a.address, staging[0].address, nbytes, stream.handle)
        context.call("cuMemcpyHtoDAsync", b.address, staging[1].address, nbytes, stream.handle)
        self._kernel(a, b, c, n, warps=-(-n // 32), stream=stream)
        context.call("cuMemcpyDtoHAsync", staging[2].address, c.address, nbytes, stream.handle)

    def finish(self, slot: int) -> None:
        self._device.synchronize(self._streams[slot])


class _Numpy(_Adder):
    """The calling thread adds, while those of the pool read and write."""

    def begin(
        self,
        slot: int,  # noqa: ARG002 (the GPU's streams are chosen by it)
        staging: Sequence[DeviceMemory],
        nbytes: int,
    ) -> None:
        a, b, c = (memory.as_numpy()[:nbytes].view(np.float64) for memory in staging)
        np.add(a, b, out=c)

    def finish(self, slot: int) -> None:
        """Do nothing: the sums were there when `begin` returned."""


Move = Callable[[int, memoryview, int], None]


class _Tiles:
    """The pipeline of tiles. A slot has pinned memory for one tile of each vector."""

    def __init__(
        self,
        stack: ExitStack,
        device: Device,
        files: _Files,
        adder: _Adder,
        room: int,
        threads: int,
    ) -> None:
        self._files = files
        self._adder = adder
        self._staging = [
            [stack.enter_context(device.allocate_host(room)) for _ in "abc"] for _ in range(_SLOTS)
        ]
        # After the memory, so that its threads are done before the memory is freed.
        self.pool = stack.enter_context(ThreadPoolExecutor(threads))

    def add(self, tile: int) -> None:
        """Read, add and write, each a tile behind the one before it."""
        nbytes = self._files.nbytes
        count = -(-nbytes // tile)
        read: list[list[Future[None]]] = [[] for _ in range(_SLOTS)]
        written: list[list[Future[None]]] = [[] for _ in range(_SLOTS)]
        for step in range(count + 2):
            if step < count:
                # The sums of this slot's last tile are out since the step before, so nobody reads
                # its inputs any more; the sums themselves may still be on their way to the file.
                slot, first = step % _SLOTS, step * tile
                read[slot] = [
                    job
                    for vector in (0, 1)
                    for job in self._move(_read, vector, slot, first, min(tile, nbytes - first))
                ]
            if 1 <= step <= count:
                slot, first = (step - 1) % _SLOTS, (step - 1) * tile
                _wait(read[slot])
                _wait(written[slot])
                self._adder.begin(slot, self._staging[slot], min(tile, nbytes - first))
            if step >= 2:
                slot, first = (step - 2) % _SLOTS, (step - 2) * tile
                self._adder.finish(slot)
                written[slot] = self._move(_write, 2, slot, first, min(tile, nbytes - first))
        for jobs in written:
            _wait(jobs)

    def _move(
        self, move: Move, vector: int, slot: int, first: int, nbytes: int
    ) -> list[Future[None]]:
        """Begin to move a tile between staging memory and its file, in pieces of whole pages."""
        pages = -(-nbytes // _PAGE_BYTES)
        piece = -(-pages // _PIECES) * _PAGE_BYTES
        memory = self._staging[slot][vector].as_numpy().data
        file = self._files.handles[vector]
        return [
            self.pool.submit(move, file, memory[at : min(at + piece, nbytes)], first + at)
            for at in range(0, nbytes, piece)
        ]


def _wait(jobs: Sequence[Future[Any]]) -> None:
    for job in jobs:
        job.result()


def _read(file: int, memory: memoryview, offset: int) -> None:
    while memory.nbytes:
        got = os.preadv(file, [memory], offset)
        if got == 0:
            raise EOFError(f"the file ends at {offset}")
        memory, offset = memory[got:], offset + got


def _write(file: int, memory: memoryview, offset: int) -> None:
    while memory.nbytes:
        done = os.pwrite(file, memory, offset)
        memory, offset = memory[done:], offset + done
