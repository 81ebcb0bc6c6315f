"""Random rows into a contiguous buffer: each way of a batch, beside what the machine can do.

Stands beside figures 8, 13 and 16 of the CAM paper: throughput by granularity, CPU time of a
request, and many small copies to places apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import flashwarp as fw
from benchmarks.base import listed
from benchmarks.pipelines import ranges as pipelines_ranges
from benchmarks.pipelines.base import Bench, Cost, Data
from benchmarks.pipelines.host import Ahead
from flashwarp.config import parse_bytes
from flashwarp.probe import disk
from flashwarp.probe.link import measure_link
from flashwarp.program.compiling import Program

__all__ = ["measure"]

_KERNELS = Path(__file__).with_name("pipelines.cu")
_OF_CEILING = 0.95
_FROM_COPIES = 64 << 10  # rows whose default is copies, if the ids are on the host
_DISK_BATCH = 64 << 20
_SMALLEST_DIRECT = 4096
_PULL_WARPS = (256, 4096)  # of blocks of eight: the better one is the ceiling
_BATCH_WARPS = 8  # of the kernel that starts batches: a block
_SENT_MAX = 1 << 14
_THREADS = (1, 4, 8, 12)
_SWEPT = 4096
_PULLED, _BATCHED = "warps in place", "one call of the driver"
_READ = "threads that pread"
_COPIES_PAPER = "1.3 GB/s at 4 KiB of about 20 (CAM figure 16)"
_PAPER = "20 GB/s at 4 KiB of 12 drives (CAM figure 8)"


@dataclass
class _Way:
    """One way to fill buffers, as it was measured."""

    name: str
    rate: float
    cost: Cost
    right: bool
    note: str = ""
    way: str = ""
    """As the pipeline explains it, and how many threads of the host it uses."""
    threads: int = 0


class _Call(NamedTuple):
    """A call that fills a buffer, and what it has filled, in the order of the ids."""

    run: Callable[[], object]
    found: Callable[[], Any]


def measure(bench: Bench, data: Data, sizes: str, batch: int, storages: list[str]) -> None:
    """Measure rows of each size from each storage."""
    link = measure_link(bench.device).to_gpu / 1e9 if bench.on_gpu else 0.0
    if link:
        bench.add("copy engine, pinned memory", link, "GB/s", footprint=128 << 20)
    program = fw.compile(_KERNELS, bench.device)
    for row_bytes in map(parse_bytes, listed("rows", sizes)):
        for storage in storages:
            if storage == "O_DIRECT" and not _takes_direct(data, row_bytes):
                continue
            _Rows(bench, data, program, storage, row_bytes, batch, link).measure()
    for storage in storages:
        if storage != "O_DIRECT":
            pipelines_ranges.measure(bench, data, storage, batch, link)


def _takes_direct(data: Data, row_bytes: int) -> bool:
    data.write()
    return row_bytes >= _SMALLEST_DIRECT and disk.direct_reads_work(data.path)


class _Rows:
    """Rows of one size from one storage."""

    def __init__(
        self, bench: Bench, data: Data, program: Program, storage: str, row_bytes: int,
        batch: int, link: float,
    ) -> None:  # fmt: skip
        self.bench, self.data, self.program, self.link = bench, data, program, link
        self.storage, self.row_bytes = storage, row_bytes
        nbytes = min(batch, _DISK_BATCH) if storage == "O_DIRECT" else batch
        self.rows = max(1, min(nbytes, data.nbytes) // row_bytes)
        self.nbytes = self.rows * row_bytes
        self.count = data.nbytes // row_bytes
        count = 4 if storage == "O_DIRECT" else 8
        self.batches = [bench.draw(number, self.rows, self.count) for number in range(count)]
        self.label = f"{storage}, rows of {_size(row_bytes)}"

    def measure(self) -> None:
        """Measure our ways and the others, and add what they are to each other."""
        with self.data.open(self.storage, self.row_bytes) as array:
            ours = list(self._ours(array))
            others = {way.name: way for way in self._others(array)}
        reading = self._reading(others)
        if self.storage == "O_DIRECT":
            seen = disk.measure_ceiling(self.data.path, self.row_bytes, 0.5)
            ceiling = ("the disk", seen.random_gb_per_s)
        for way in others.values():
            self._add(f"{self.label}: {way.name}", way)
        for way in ours:
            name = f"{self.label}: {way.name}"
            if self.storage != "O_DIRECT":
                ceiling = self._ceiling(way, others)
            if ceiling[1]:
                self._add(name, way, ceiling, _OF_CEILING, paper=_PAPER)
            best = max(others.values(), key=lambda other: other.rate)
            if best.name != ceiling[0]:
                self._add(name, way, (best.name, best.rate))
            self._add_cpu(way, reading)

    def _add(
        self, name: str, way: _Way, against: tuple[str, float] = ("", 0.0), target: float = 0.0,
        paper: str = "",
    ) -> None:  # fmt: skip
        self.bench.add(
            name, way.rate, "GB/s", against, target, way.right, paper=paper, note=way.note,
            footprint=self.data.nbytes,
        )  # fmt: skip

    def _reading(self, others: dict[str, _Way]) -> _Way:
        """Return the threads that `pread` the file into pinned memory."""
        if self.storage != "memory":
            return [way for way in others.values() if way.way == _READ][-1]
        # The same rows of the file, which is in the page cache after the turn that does not count.
        self.data.write()
        return self._by_host(self.bench.threads, from_file=True)

    def _add_cpu(self, way: _Way, reading: _Way) -> None:
        """Add the CPU time of a million rows, beside that of threads that read."""
        million = 1e6 / (self.rows * len(self.batches))
        self.bench.add(
            f"{self.label}: {way.name}, CPU time", way.cost.cpu_seconds * million,
            "CPU s a million rows", (reading.name, reading.cost.cpu_seconds * million),
            paper="CAM figure 13",
        )  # fmt: skip

    def _ceiling(self, way: _Way, others: dict[str, _Way]) -> tuple[str, float]:
        """Return what this machine does by the way that was chosen."""
        against = {"pull": _PULLED, "copies": _BATCHED}.get(
            way.way, f"host gather, {way.threads} threads"
        )
        other = others.get(against)
        return (against, min(other.rate, self.link or other.rate)) if other else ("", 0.0)

    # Ours.

    def _ours(self, array: fw.Array) -> Iterator[_Way]:
        yield self._pipelined(array, "ours", self.batches)
        if self.row_bytes >= _FROM_COPIES and self.storage != "O_DIRECT":
            host = [ids.cpu().numpy() for ids in self.batches]
            yield self._pipelined(array, "ours, ids on the host", host)
        for threads in self._threads() if "without SMs" in self.bench.ways else ():
            name = f"ours without SMs, {threads} threads"
            yield self._pipelined(array, name, self.batches, sms=0, workers=threads)
        yield self._by_kernel(array)

    def _threads(self) -> tuple[int, ...]:
        most = self.bench.threads
        if self.row_bytes != _SWEPT:
            return (most,)
        return tuple(sorted({min(each, most) for each in _THREADS}))

    def _pipelined(self, array: fw.Array, name: str, batches: list[Any], **options: Any) -> _Way:
        bench = self.bench
        with fw.Pipeline(array, self.rows, stream=bench.stream, **options) as pipeline:

            def stream() -> None:
                for _ in pipeline.iterate(batches):
                    pass

            cost = bench.median_cost(stream)
            right = [bench.rows_right(rows, ids) for rows, ids in pipeline.iterate(batches[:3])]
            told = pipeline.explain()
        note = f"{told.multiprocessors} SMs, {told.host_threads} threads; array {told.array}"
        # Beside those that move rows there is one that polls.
        threads = told.host_threads - (told.way in ("ring", "workers"))
        return _Way(
            f"{name} ({told.way})", self._rate(cost), cost, all(right), note, told.way, threads
        )

    def _by_kernel(self, array: fw.Array) -> _Way:
        """Batches that a kernel of one block starts, and host threads serve."""
        bench, torch, words = self.bench, self.bench.torch, self.row_bytes // 4
        ids = torch.cat(self.batches)
        buffers = torch.empty((2, self.rows, words), dtype=torch.int32, device=bench.place)
        failed = torch.zeros(1, dtype=torch.int64, device=bench.place)
        with fw.Pipeline(array, self.rows, stream=bench.stream) as pipeline:
            calls, many = pipeline.device_calls, len(self.batches)

            def stream() -> None:
                self.program["stream_batches"](
                    calls, ids, self.rows, many, buffers, words, failed, warps=_BATCH_WARPS
                )

            cost = bench.median_cost(stream)
            calls.check()
            right = int(failed) == 0 and all(
                bench.rows_right(buffers[number % 2], self.batches[number])
                for number in range(max(0, many - 2), many)
            )
            threads = calls.engine.worker_limits[1]
        note = f"{threads} threads; the kernel waits in one block"
        return _Way("ours, of a kernel", self._rate(cost), cost, right, note, "ring", threads)

    def _rate(self, cost: Cost) -> float:
        return len(self.batches) * self.nbytes / cost.seconds / 1e9

    # What the machine can do.

    def _others(self, array: fw.Array) -> Iterator[_Way]:
        for threads in self._threads():
            yield self._by_host(threads)
        # Of the mapped file, or of the memory itself: what a GPU may read.
        if array.in_place is None:
            return
        pulled = [
            self._by_calls(_PULLED, self._puller(array, warps), self.batches, f"{warps} warps")
            for warps in _PULL_WARPS
        ]
        yield max(pulled, key=lambda way: way.rate)
        if not self.bench.on_gpu:
            return
        into = self.bench.torch.empty(self.nbytes, dtype=self.bench.torch.uint8, device="cuda")
        few = [ids[:_SENT_MAX] for ids in self.batches[:2]]
        for name, batched, paper in (
            (_BATCHED, True, ""),
            ("a copy for each row", False, _COPIES_PAPER),
        ):
            try:
                way = self._by_calls(name, self._sender(array, into, batched), few)
            except NotImplementedError:
                continue
            way.note = paper
            yield way

    def _by_host(self, threads: int, from_file: bool = False) -> _Way:
        """Threads that fill pinned buffers: by copies of memory, or reads of the file."""
        bench, row_bytes = self.bench, self.row_bytes
        from_file = from_file or self.storage != "memory"
        with self._reader(threads, from_file) as fill:
            ahead = Ahead(
                bench.torch, bench.place, (self.rows, row_bytes // 4), bench.torch.int32, fill
            )
            host = [ids.cpu().numpy() for ids in self.batches]

            def stream() -> None:
                for _ in ahead.iterate(host):
                    pass

            cost = bench.median_cost(stream)
            right = [bench.rows_right(rows, ids) for rows, ids in ahead.iterate(host[:2])]
        way = _READ if from_file else "host gather"
        # Of the page cache, reads take the place of a gather: what `_ceiling` looks for.
        name = f"host gather, {threads} threads"
        if from_file and self.storage != "page cache":
            name = f"{threads} {way}"
        return _Way(name, self._rate(cost), cost, all(right), way, way)

    @contextmanager
    def _reader(self, threads: int, from_file: bool) -> Iterator[Callable[[Any, Any], int]]:
        bench, row_bytes = self.bench, self.row_bytes
        if not from_file:
            memory = self.data.memory.view(np.uint8)

            def fill(into: Any, ids: Any) -> int:
                bench.loops.gather(memory, into, ids * row_bytes, row_bytes, threads)
                return len(ids)

            yield fill
            return
        direct = os.O_DIRECT if self.storage == "O_DIRECT" else 0
        file = os.open(self.data.path, os.O_RDONLY | direct)

        def read(into: Any, ids: Any) -> int:
            bench.loops.read(file, into, ids * row_bytes, row_bytes, threads)
            return len(ids)

        try:
            yield read
        finally:
            os.close(file)

    def _by_calls(
        self, name: str, prepare: Callable[[Any], _Call], batches: list[Any], note: str = ""
    ) -> _Way:
        """Calls that each fill the same buffer with one batch."""
        calls = [prepare(ids) for ids in batches]
        cost = self.bench.median_cost(lambda: [each.run() for each in calls])
        right = self.bench.rows_right(calls[-1].found(), batches[-1])
        nbytes = sum(len(ids) for ids in batches) * self.row_bytes
        return _Way(name, nbytes / cost.seconds / 1e9, cost, right, note)

    def _puller(self, array: fw.Array, warps: int) -> Callable[[Any], _Call]:
        torch, kernel = self.bench.torch, self.program["pull_rows"]
        into = torch.empty(
            (self.rows, self.row_bytes // 4), dtype=torch.int32, device=self.bench.place
        )
        shift = (self.row_bytes // 16).bit_length() - 1

        def prepare(ids: Any) -> _Call:
            words = len(ids) * self.row_bytes // 16
            place = [array.in_place, ids, into.data_ptr(), words, shift]
            return _Call(partial(kernel, *place, warps=warps), lambda: into[: len(ids)])

        return prepare

    def _sender(self, array: fw.Array, into: Any, batched: bool) -> Callable[[Any], _Call]:
        loops, current = self.bench.loops, self.bench.stream
        # The driver takes no batches on the default stream.
        stream = self.bench.torch.cuda.Stream()
        base = int(array.in_place or 0)

        def prepare(ids: Any) -> _Call:
            source = (base + ids.cpu().numpy() * self.row_bytes).astype(np.uint64)
            # Each row has a place of its own, none beside the last one.
            places = np.random.default_rng(1).permutation(len(ids))
            to = (into.data_ptr() + places * self.row_bytes).astype(np.uint64)
            rows = into.view(self.bench.torch.int32).view(-1, self.row_bytes // 4)

            def send() -> None:
                loops.send(to, source, self.row_bytes, stream.cuda_stream, batched=batched)
                current.wait_stream(stream)

            return _Call(
                send,
                lambda: rows[self.bench.torch.as_tensor(places, device=rows.device)],
            )

        return prepare


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes >= 1024 else f"{nbytes} B"
