"""What a disk gives to large transfers without flashwarp: the ceiling of checkpoints."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Disk"]

_WAYS = ((16 << 20, 4), (16 << 20, 1))
_OFTEN = (16 << 20, 4)
"""Bytes of a transfer, and how many at a time."""


@dataclass(frozen=True)
class Disk:
    """Rates in bytes a second."""

    writes: float
    reads: float

    def best(self, other: Disk) -> Disk:
        """Return the better of each rate: a disk may be slower at one time than at another."""
        return Disk(max(self.writes, other.writes), max(self.reads, other.reads))

    @staticmethod
    def measure(folder: Path, nbytes: int) -> Disk:
        """Write a file past the page cache until it is durable, and read it, in the best way."""
        path = folder / "ceiling"
        try:
            writes = max(_rate(path, nbytes, *way, write=True) for way in _WAYS)
            reads = max(_rate(path, nbytes, *way, write=False) for way in _WAYS)
        finally:
            path.unlink(missing_ok=True)
        return Disk(writes, reads)

    @staticmethod
    def measured_writes(folder: Path, nbytes: int) -> float:
        """Return the rate of one file, for comparisons that are made again and again."""
        path = folder / "ceiling"
        try:
            return _rate(path, nbytes, *_OFTEN, write=True)
        finally:
            path.unlink(missing_ok=True)


def _rate(path: Path, nbytes: int, size: int, depth: int, *, write: bool) -> float:
    mode = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if write else 0)
    try:
        descriptor = os.open(path, mode | os.O_DIRECT)
    except OSError:  # a file system without it
        descriptor = os.open(path, mode)
    size = min(size, max(nbytes // depth // 4096 * 4096, 4096))
    places = range(0, max(nbytes - size, 0) + 1, size)
    # Anonymous mappings are page-aligned. Random, so that nothing on the way compresses them.
    buffers = [mmap.mmap(-1, size) for _ in range(depth)]
    for buffer in buffers:
        buffer.write(np.random.default_rng(1).bytes(size))

    def transfer(worker: int) -> int:
        buffer, done = buffers[worker], 0
        for place in places[worker::depth]:
            if write:
                done += os.pwrite(descriptor, buffer, place)
            else:
                done += os.preadv(descriptor, [buffer], place)
        return done

    try:
        began = time.perf_counter()
        if write:
            os.posix_fallocate(descriptor, 0, nbytes)
        with ThreadPoolExecutor(depth) as pool:
            done = sum(pool.map(transfer, range(depth)))
        if write:
            os.fsync(descriptor)
        return done / (time.perf_counter() - began)
    finally:
        os.close(descriptor)
