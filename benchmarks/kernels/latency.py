"""What one miss costs that somebody waits for: dependent loads of one thread and of one warp.

Each load's place depends on what the last one gave. The rows stand beside the least that the way
can cost: a copy of the block by a warp, a plain load, and for a file past the page cache the disk's
own latency, by reads one at a time.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from flashwarp.config import parse_bytes
from flashwarp.device import Device, DeviceArray, resolve
from flashwarp.probe.disk import direct_reads_work, drop_page_cache, fill_page_cache
from flashwarp.probe.timing import device_seconds

__all__ = ["run"]

_WORD = 4
_RUNS = 5
# The launch of one warp: other warps of a block would wait for the same lines.
_ALONE: dict[str, Any] = {"warps": 1, "block_threads": 32}


def run(
    device: str | None,
    folder: Path,
    size: Annotated[str, "Bytes of the data."] = "4 GiB",
    line: Annotated[str, "Bytes of a line."] = "4 KiB",
    steps: Annotated[int, "Loads of one measurement."] = 2000,
    seed: Annotated[int, "Of the random places."] = 1,
) -> Record:
    """Time dependent loads that miss, by the way that their data takes, and loads that hit."""
    where = resolve(device)
    bench = _Latency(where, parse_bytes(line), steps, seed)
    settings = {"size": size, "line": line, "steps": steps}
    bench.report = Record("Latency", where.describe(), settings, {"places": seed})
    words = parse_bytes(size) // _WORD
    bench.footprint = words * _WORD
    data = np.arange(words, dtype=np.uint32)
    bench.memory(data)
    path = folder / "data.bin"
    data.tofile(path)
    os.sync()
    bench.file(path, o_direct=False)
    if direct_reads_work(path):
        bench.file(path, o_direct=True)
    else:
        print("no O_DIRECT on this file system: give another folder to measure the disk")
    return bench.report


class _Latency:
    """Chains of loads on one device."""

    report: Record
    footprint: int

    def __init__(self, device: Device, line_bytes: int, steps: int, seed: int) -> None:
        self.device = device
        self.line_bytes = line_bytes
        self.words = line_bytes // _WORD
        self.steps = steps
        self.turns = iter(range(seed << 40, 1 << 60, 1 << 32))
        self.program = fw.compile(Path(__file__).with_suffix(".cu"), device)
        # On the CPU device a warp is one lane wide.
        self.groups = {"one thread": 1, "one warp": 32} if device.kind == "cuda" else {"": 1}

    def memory(self, data: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """Data in pinned host memory: plain loads, copies, misses, and hits of a small part."""
        blocks = data.size // self.words
        with self._opened(fw.storage.Memory(data, writable=False), data.nbytes // 16) as array:
            address = array.in_place
            if address is not None:
                plain = self._microseconds(
                    lambda wrong: self.program["chase_plain"](
                        address, blocks, self.words, self.steps, next(self.turns), 1, wrong,
                        **_ALONE,
                    )
                )  # fmt: skip
                self._add("a plain load of the storage's memory", plain)
                with self.device.empty_array((self.words,), np.uint32) as to:
                    copy = self._microseconds(
                        lambda wrong: self.program["chase_copies"](
                            address, to, blocks, self.words, self.steps, next(self.turns), wrong,
                            **_ALONE,
                        )
                    )  # fmt: skip
                self._add("a copy of a line by a warp", copy, "a plain load", plain)
                self._misses(array, "in memory", "a copy of a line by a warp", copy)
            else:
                self._misses(array, "in memory", "", None)
        few = min(blocks, 1024)
        with self._opened(fw.storage.Memory(data, writable=False), 4 * few * self.line_bytes) as x:
            x.prefetch(slice(0, few * self.words))
            self._chase(x, few)  # whatever was not prefetched yet
            for name, lanes in self.groups.items():
                self._add(_named(name, "a hit"), self._chase(x, few, lanes))

    def file(self, path: Path, o_direct: bool) -> None:
        """Data in a file, through the page cache or past it."""
        if o_direct:
            drop_page_cache(path)
            name, other, reference = "past the page cache", "the disk, one read at a time", None
            reference = self._disk(path)
        else:
            fill_page_cache(path)
            name, other, reference = "in the page cache", "", None
        with self._opened(path, path.stat().st_size // 16, o_direct=o_direct) as array:
            self._misses(array, f"in a file {name}", other, reference)

    def _misses(
        self, array: fw.Array, where: str, other: str, reference: tuple[float, bool] | None
    ) -> None:
        blocks = array.size // self.words
        path = array.explain().path
        for name, lanes in self.groups.items():
            array.drop_cache()
            found = self._chase(array, blocks, lanes)
            self._add(_named(name, f"a miss {where}, {path}"), found, other, reference)

    def _chase(self, array: fw.Array, blocks: int, lanes: int = 1) -> tuple[float, bool]:
        found = self._microseconds(
            lambda wrong: self.program["chase_array"](
                array, blocks, self.words, self.steps, next(self.turns), lanes, wrong, **_ALONE
            )
        )
        array.synchronize()
        return found

    def _microseconds(self, launch: Callable[[DeviceArray], object]) -> tuple[float, bool]:
        """Return microseconds of a load, and whether all were right."""
        with self.device.empty_array((1,), np.uint64) as wrong:
            self.device.upload(wrong.address, np.zeros(1, np.uint64))
            times = [device_seconds(self.device, lambda: launch(wrong)) for _ in range(_RUNS + 1)]
            right = int(wrong.copy_to_host()[0]) == 0
        return median(times[1:]) / self.steps * 1e6, right

    def _disk(self, path: Path) -> tuple[float, bool]:
        """Read random lines, one at a time, past the page cache, from Python."""
        rng = np.random.default_rng(next(self.turns))
        lines = path.stat().st_size // self.line_bytes
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, self.line_bytes) as buffer:
                times = []
                for line in rng.integers(0, lines, self.steps).tolist():
                    start = time.perf_counter()
                    os.preadv(fd, [buffer], line * self.line_bytes)
                    times.append(time.perf_counter() - start)
        finally:
            os.close(fd)
        found = median(times) * 1e6, True
        self._add("the disk, one read at a time", found)
        return found

    def _opened(self, source: Any, cache: int, o_direct: bool | None = None) -> fw.Array:
        return fw.open(
            source, dtype=np.uint32, device=self.device, line=self.line_bytes,
            cache=max(cache, 1 << 24), o_direct=o_direct,
        )  # fmt: skip

    def _add(
        self,
        name: str,
        found: tuple[float, bool],
        other: str = "",
        reference: tuple[float, bool] | None = None,
    ) -> None:
        least = reference[0] if reference else 0.0
        self.report.row(
            name,
            found[0],
            "us",
            other if reference else "",
            least,
            checked=found[1],
            footprint=self.footprint,
        )


def _named(who: str, what: str) -> str:
    return f"{who}: {what}" if who else what
