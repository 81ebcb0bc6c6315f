"""Where time and cores go (figures 2 to 4 of the CAM paper).

What a request costs on the host by each way to a file, and what computing loses beside reading by
each way to a GPU. `pipelines_staging.py` has the host's memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.pipelines import staging as pipelines_staging
from benchmarks.pipelines.base import Bench, Data
from flashwarp.device import CpuDevice
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.probe import disk
from flashwarp.transfer import Gatherer

__all__ = ["measure"]

_ROW_BYTES = 4096
_BATCH = 32 << 20
_DISK_S = 0.5
_BESIDE_S = 0.06
_KERNEL_PAPER = "more than 0.34 in file system and I/O map (CAM figure 3)"
_SMS_PAPER = "nearly all multiprocessors above 5 drives (CAM figure 4)"


def measure(bench: Bench, data: Data) -> None:
    """Measure all of them."""
    _reads(bench, data)
    _writes(bench, data)
    if bench.on_gpu:
        _Beside(bench, data).measure()
    pipelines_staging.measure(bench)


# Requests.


def _reads(bench: Bench, data: Data) -> None:
    """Read random blocks of the file by each way, and tell what a read costs."""
    data.write()
    nbytes = min(_BATCH, data.nbytes)
    into = np.empty(nbytes + 4096, np.uint8)
    into = into[-into.ctypes.data % 4096 :][:nbytes]
    count = nbytes // _ROW_BYTES
    ids = np.random.default_rng(bench.seed).integers(0, data.nbytes // _ROW_BYTES, count)
    offsets = ids * _ROW_BYTES
    direct = disk.direct_reads_work(data.path)
    disk_rate = ("", 0.0)
    if direct:
        ceiling = disk.measure_ceiling(data.path, _ROW_BYTES, _DISK_S)
        ceiling_cost = bench.cost(lambda: disk.read_blocks(data.path, ids, _ROW_BYTES, 256))
        disk_rate = ("the disk at depth 256", ceiling.random_reads_per_s / 1e3)
        _tell(bench, "reads, O_DIRECT, libaio", count, ceiling_cost, disk_rate, True, data.nbytes)
    for name, flags in (("page cache", 0), ("O_DIRECT", os.O_DIRECT)):
        if flags and not direct:
            continue
        file = os.open(data.path, os.O_RDONLY | flags)
        try:
            ways: dict[str, Callable[[], object]] = {
                f"pread, {threads} threads": partial(
                    bench.loops.read, file, into, offsets, _ROW_BYTES, threads
                )
                for threads in sorted({1, bench.threads})
            }
            for threads in sorted({1, min(4, bench.threads)}):
                with Gatherer(threads) as gatherer:
                    label = f"{gatherer.file_engine}, {threads} threads"
                    ways[label] = partial(_gather, file, into, offsets, threads)
            for label, way in ways.items():
                into[:] = 0
                cost = bench.cost(way)
                words = into.view(np.int32).reshape(count, -1)
                right = bool((words[:, 0] == ids * (_ROW_BYTES // 4)).all())
                against = disk_rate if flags else ("", 0.0)
                label = f"reads, {name}, {label}"
                _tell(bench, label, count, cost, against, right, data.nbytes)
        finally:
            os.close(file)


def _writes(bench: Bench, data: Data) -> None:
    """Write blocks of a second file in a random order by each way."""
    nbytes = min(_BATCH, data.nbytes)
    count = nbytes // _ROW_BYTES
    ids = np.random.default_rng(bench.seed).permutation(count)
    blocks = data.memory[: nbytes // 4].reshape(count, -1)
    memory = np.empty(nbytes + 4096, np.uint8)
    rows = memory[-memory.ctypes.data % 4096 :][:nbytes].view(np.int32).reshape(count, -1)
    rows[:] = blocks[ids]
    path = data.path.with_name("written.bin")
    for name, o_direct in (("page cache", False), ("O_DIRECT", True)):
        if o_direct and not disk.direct_reads_work(data.path):
            continue
        rates: dict[str, float] = {}
        for threads in sorted({1, bench.threads}):
            for by, way in (("pwrite", _pwrites), ("the engine of pipelines", _writes_of_engine)):
                # The file system has blocks for them, and no write-back runs beside.
                path.write_bytes(bytes(nbytes))
                disk.drop_page_cache(path)
                with way(bench, path, rows, ids, threads, o_direct) as write:
                    cost = bench.median_cost(write)
                found = np.fromfile(path, np.int32).reshape(count, -1)
                label = f"writes, {name}, {by}, {threads} threads"
                other = f"pwrite, {threads} threads"
                against = (other, rates[other] / 1e3) if other in rates else ("", 0.0)
                rates[f"{by}, {threads} threads"] = count / cost.seconds
                _tell(bench, label, count, cost, against, bool((found == blocks).all()), nbytes)
    path.unlink()


@contextlib.contextmanager
def _pwrites(
    bench: Bench, path: Path, rows: Any, ids: Any, threads: int, o_direct: bool
) -> Iterator[Callable[[], object]]:
    file = os.open(path, os.O_RDWR | (os.O_DIRECT if o_direct else 0))
    try:
        data = rows.view(np.uint8).reshape(-1)
        yield partial(bench.loops.write, file, data, ids * _ROW_BYTES, _ROW_BYTES, threads)
    finally:
        os.close(file)


@contextlib.contextmanager
def _writes_of_engine(
    bench: Bench, path: Path, rows: Any, ids: Any, threads: int, o_direct: bool
) -> Iterator[Callable[[], object]]:
    del bench
    with (
        contextlib.closing(fw.storage.File(path, writable=True, o_direct=o_direct)) as storage,
        BatchEngine(
            CpuDevice(), storage, rows=len(rows), row_bytes=_ROW_BYTES, batch_rows=len(rows),
            directions=("write_back",), workers=threads,
        ) as engine,
    ):  # fmt: skip

        def write() -> None:
            engine.wait("write_back", engine.submit("write_back", ids, rows.ctypes.data))

        yield write


def _gather(file: int, into: Any, offsets: Any, threads: int) -> None:
    with Gatherer(threads) as gatherer:
        gatherer.read(into, file, offsets, _ROW_BYTES)


def _tell(
    bench: Bench, name: str, count: int, cost: Any, against: tuple[str, float], right: bool,
    footprint: int,
) -> None:  # fmt: skip
    kernel = cost.kernel_seconds / max(cost.cpu_seconds, 1e-9)
    bench.add(
        f"4 KiB {name}", count / cost.seconds / 1e3, "k/s", against, checked=right,
        paper=_KERNEL_PAPER, footprint=footprint,
        note=f"{cost.cpu_seconds / count * 1e6:.3g} us of CPU each, {kernel:.2f} of it in the "
        "kernel",
    )  # fmt: skip


# Computation beside reading.


class _Beside:
    """Products of matrices while rows arrive on another stream."""

    def __init__(self, bench: Bench, data: Data) -> None:
        self.bench, self.data, torch = bench, data, bench.torch
        self.a = torch.randn((4096, 4096), device=bench.place).to(torch.bfloat16)
        self.out = torch.empty_like(self.a)
        each = bench.median_cost(lambda: self.compute(50)).seconds / 50
        self.products = max(10, round(_BESIDE_S / each))
        self.side = torch.cuda.Stream()
        self.rows = 64 << 20 >> 12

    def compute(self, products: int) -> None:
        """Queue some products."""
        for _ in range(products):
            self.bench.torch.mm(self.a, self.a, out=self.out)

    def measure(self) -> None:
        """Tell what computing keeps of its rate beside each way of reading."""
        alone = self._beside(lambda _: None)[0]
        bounce = fw.nvme.SoftwareController(route="bounce")
        ways: list[tuple[str, dict[str, Any], Callable[..., Callable[[Any], None]]]] = [
            ("gather by polled commands", {"controller": bounce}, self._gathering),
            ("gather in place", {}, self._gathering),
            *[
                (f"a pipeline, {name}", {}, partial(self._piping, options))
                for name, options in self.bench.ways.items()
            ],
        ]
        for name, settings, make in ways:
            shape = (self.data.nbytes // _ROW_BYTES, _ROW_BYTES // 4)
            memory = fw.storage.Memory(self.data.memory.view(np.uint8), writable=False)
            with fw.open(
                memory, "r", np.int32, shape, device=self.bench.device, cache="256 MiB", **settings
            ) as array:
                with contextlib.ExitStack() as undo:
                    computing, rate = self._beside(make(array, undo))
                path = array.explain().route
            self.bench.add(
                f"computing beside {name}", alone / computing, "of its rate alone",
                paper=_SMS_PAPER, note=f"{path}; rows of 4 KiB at {rate:.3g} GB/s meanwhile",
            )  # fmt: skip

    def _beside(self, read: Callable[[Any], None]) -> tuple[float, float]:
        """Return the seconds of computing, and the GB/s of reading in the same time."""
        torch, batches = self.bench.torch, 24
        count = self.data.nbytes // _ROW_BYTES
        ids = [self.bench.draw(number, self.rows, count) for number in range(batches)]
        read(ids[:3])
        self.bench.torch.cuda.synchronize()
        times = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self.side.wait_stream(torch.cuda.current_stream())

        def run() -> None:
            times[0].record(self.side)
            read(ids)
            times[1].record(self.side)

        # In a thread of its own: a reader may wait, and must not hold the computation up.
        reader = threading.Thread(target=run)
        reader.start()
        times[2].record()
        self.compute(self.products)
        times[3].record()
        reader.join()
        torch.cuda.synchronize()
        reading = times[0].elapsed_time(times[1]) / 1e3
        nbytes = batches * self.rows * _ROW_BYTES
        return times[2].elapsed_time(times[3]) / 1e3, nbytes / max(reading, 1e-9) / 1e9

    def _gathering(self, array: fw.Array, undo: contextlib.ExitStack) -> Callable[[Any], None]:
        del undo
        torch = self.bench.torch
        outs = [torch.empty((self.rows, _ROW_BYTES // 4), dtype=torch.int32, device="cuda")] * 2

        def read(ids: Any) -> None:
            for number, each in enumerate(ids):
                array.gather(each, outs[number % 2], stream=self.side)

        return read

    def _piping(
        self, options: dict[str, Any], array: fw.Array, undo: contextlib.ExitStack
    ) -> Callable[[Any], None]:
        pipeline = undo.enter_context(fw.Pipeline(array, self.rows, stream=self.side, **options))

        def read(ids: Any) -> None:
            for _ in pipeline.iterate(ids):
                pass

        return read
