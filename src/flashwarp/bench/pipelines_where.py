"""Where time, cores and memory traffic go (figures 2 to 4, 14 and 15 of the CAM paper).

What a request costs on the host by each way to a file; what computing loses beside reading by each
way to a GPU; and how often a delivered byte crosses the host's memory. The last is a model for
GPUs, since nothing here counts that traffic; on the CPU device, staging and a controller that
writes frames itself are measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.bench.pipelines_base import Bench, Data
from flashwarp.device import CpuDevice
from flashwarp.probe import disk
from flashwarp.transfer import Gatherer

__all__ = ["measure"]

_ROW_BYTES = 4096
_BATCH = 32 << 20
_DISK_S = 0.5
_BESIDE_S = 0.06
_STAGED_BYTES = 64 << 20
_KERNEL_PAPER = "more than 0.34 in file system and I/O map (CAM figure 3)"
_SMS_PAPER = "nearly all multiprocessors above 5 drives (CAM figure 4)"
_STAGING_PAPER = "staging: nearly twice the drives' bandwidth (CAM figure 14)"

# How often the host's memory is crossed for each byte that a GPU gets.
_CROSSED = {
    "rows in memory or page cache, pulled or by copies": (1, "one read by the link"),
    "rows in memory or page cache, gathered by host threads": (
        3,
        "read and written by a thread, read by the link",
    ),
    "O_DIRECT into pinned memory": (2, "written by the disk, read by the link"),
    "pread through the page cache into pinned memory, cold": (
        4,
        "written by the disk, read and written by a thread, read by the link",
    ),
    "a controller that writes to the GPU's memory": (0, "no such drive is here"),
}


def measure(bench: Bench, data: Data) -> None:
    """Measure all three."""
    _requests(bench, data)
    if bench.on_gpu:
        _Beside(bench, data).measure()
    _staging(bench)
    for name, (times, why) in _CROSSED.items():
        bench.add(
            f"model: {name}", float(times), "bytes of memory traffic a byte", note=why,
            paper=_STAGING_PAPER,
        )  # fmt: skip


# Requests.


def _requests(bench: Bench, data: Data) -> None:
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
        _tell(bench, "O_DIRECT, libaio", count, ceiling_cost, disk_rate, True, data.nbytes)
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
                    label = f"{gatherer.file_way}, {threads} threads"
                    ways[label] = partial(_gather, file, into, offsets, threads)
            for label, way in ways.items():
                into[:] = 0
                cost = bench.cost(way)
                words = into.view(np.int32).reshape(count, -1)
                right = bool((words[:, 0] == ids * (_ROW_BYTES // 4)).all())
                against = disk_rate if flags else ("", 0.0)
                _tell(bench, f"{name}, {label}", count, cost, against, right, data.nbytes)
        finally:
            os.close(file)


def _gather(file: int, into: Any, offsets: Any, threads: int) -> None:
    with Gatherer(threads) as gatherer:
        gatherer.read(into, file, offsets, _ROW_BYTES)


def _tell(
    bench: Bench, name: str, count: int, cost: Any, against: tuple[str, float], right: bool,
    footprint: int,
) -> None:  # fmt: skip
    kernel = cost.kernel_seconds / max(cost.cpu_seconds, 1e-9)
    bench.add(
        f"4 KiB reads, {name}", count / cost.seconds / 1e3, "k/s", against, checked=right,
        paper=_KERNEL_PAPER, footprint=footprint,
        note=f"{cost.cpu_seconds / count * 1e6:.3g} us of CPU a read, {kernel:.2f} of it in the "
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
        bounce = fw.SoftwareController(data_path="bounce")
        ways: list[tuple[str, dict[str, Any], Callable[[fw.Array], Callable[[Any], None]]]] = [
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
                read = make(array)
                computing, rate = self._beside(read)
                path = array.explain().path
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
        times[0].record(self.side)
        read(ids)
        times[1].record(self.side)
        times[2].record()
        self.compute(self.products)
        times[3].record()
        torch.cuda.synchronize()
        reading = times[0].elapsed_time(times[1]) / 1e3
        nbytes = batches * self.rows * _ROW_BYTES
        return times[2].elapsed_time(times[3]) / 1e3, nbytes / max(reading, 1e-9) / 1e9

    def _gathering(self, array: fw.Array) -> Callable[[Any], None]:
        torch = self.bench.torch
        outs = [torch.empty((self.rows, _ROW_BYTES // 4), dtype=torch.int32, device="cuda")] * 2

        def read(ids: Any) -> None:
            for number, each in enumerate(ids):
                array.gather(each, outs[number % 2], stream=self.side)

        return read

    def _piping(self, options: dict[str, Any], array: fw.Array) -> Callable[[Any], None]:
        def read(ids: Any) -> None:
            # Its own thread of work: the consumer is empty, on the side stream.
            self.pipeline = fw.Pipeline(array, self.rows, stream=self.side, **options)
            for _ in self.pipeline.iterate(ids):
                pass

        return read


# Staging.


def _staging(bench: Bench) -> None:
    """On the CPU device: a controller that writes frames itself, against one that stages."""
    words = np.arange(_STAGED_BYTES // 4, dtype=np.int32).reshape(-1, _ROW_BYTES // 4)
    ids = np.random.default_rng(bench.seed).permutation(len(words))
    rates: dict[str, tuple[float, bool]] = {}
    device = CpuDevice()
    for way in ("bounce", "direct"):
        memory = fw.storage.Memory(words.view(np.uint8).reshape(-1), writable=False)
        with fw.open(
            memory, "r", np.int32, words.shape, device=device, cache=_STAGED_BYTES // 4,
            controller=fw.SoftwareController(data_path=way),
        ) as array:  # fmt: skip
            rows = array.gather(ids)
            seconds = bench.median_cost(partial(array.gather, ids, rows)).seconds
            rates[way] = (_STAGED_BYTES / seconds / 1e9, bool((rows == words[ids]).all()))
    direct, staged = rates["direct"], rates["bounce"]
    bench.add(
        "CPU device: a controller that writes frames itself", direct[0], "GB/s",
        ("staging", staged[0]), checked=direct[1] and staged[1], footprint=_STAGED_BYTES,
        paper="CAM figure 15",
    )  # fmt: skip
