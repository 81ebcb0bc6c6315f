"""Workers of the engine of batches: their number, dynamic and fixed, on a load that changes.

CAM's Figures 12 (throughput by drives per thread) and 13 (CPU time of requests), and the count that
follows a load whose compute time changes in steps, over modelled drives (labelled as such), a file
with O_DIRECT, and one in the page cache. Compute is a pause, as the host sees a kernel. Workers
serve the modelled drives themselves and copy their data, so their CPU time has a drive's work in
it. Some rows of each batch are checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.drives.modelled import modelled
from flashwarp.config import cores
from flashwarp.device import CpuDevice
from flashwarp.errors import ArgumentError
from flashwarp.pipeline.engine import BatchEngine, worker_limits
from flashwarp.probe import disk
from flashwarp.storage import File, Memory, Storage, Striped

__all__ = ["run"]

_DEPTH = 2
_CHECKED = 16
# Compute of each step, as multiples of the I/O time of a batch by all workers.
_STEPS = (0.0, 1.0, 8.0, 0.5)
_PAPER_12 = {2: "no loss [CAM, Figure 12]", 4: "0.75 of the best [CAM, Figure 12]"}


@dataclass
class Source:
    """What batches are read from."""

    name: str
    storage: Storage
    data: npt.NDArray[np.uint64]
    ceiling: float
    ceiling_name: str
    drives: int = 1
    controller: fw.SoftwareController | None = None
    limits: tuple[int, int] = (1, 1)


@dataclass
class Played:
    """One load: how long its steps took, and the workers at the end of each."""

    seconds: list[float] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    decisions: int = 0
    right: bool = True


class Load:
    """Batches of random rows, two in flight, with pauses between them."""

    def __init__(self, source: Source, rows: int, workers: int | tuple[int, int]) -> None:
        self.source = source
        self.rows = rows
        self.row_bytes = source.data.shape[1] * 8
        self.engine = BatchEngine(
            CpuDevice(),
            source.storage,
            rows=len(source.data),
            row_bytes=self.row_bytes,
            batch_rows=rows,
            slots=_DEPTH,
            workers=workers,
            controller=source.controller,
        )
        self._random = np.random.default_rng(1)
        self._buffers = [np.empty((rows, source.data.shape[1]), np.uint64) for _ in range(_DEPTH)]
        self._under_way: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = []
        self.right = True

    def submit(self, number: int) -> None:
        ids = self._random.integers(0, len(self.source.data), self.rows)
        buffer = self._buffers[number % _DEPTH]
        ticket = self.engine.submit("prefetch", ids, buffer.ctypes.data)
        self._under_way.append((ticket, ids, buffer))

    def synchronize(self) -> None:
        ticket, ids, buffer = self._under_way.pop(0)
        self.engine.wait("prefetch", ticket)
        some = self._random.integers(0, self.rows, _CHECKED)
        self.right = self.right and bool((buffer[some] == self.source.data[ids[some]]).all())

    def step(self, batches: int, compute_s: float) -> float:
        """Return how long so many batches take, each with a pause behind it."""
        start = time.perf_counter()
        for number in range(min(_DEPTH, batches)):
            self.submit(number)
        for number in range(batches):
            self.synchronize()
            if compute_s:
                time.sleep(compute_s)
            if number + _DEPTH < batches:
                self.submit(number)
        return time.perf_counter() - start

    def cpu_s(self) -> float:
        stats = self.engine.stats()
        return float(stats["worker_cpu_s"] + stats["polling_cpu_s"])


def play(
    source: Source, rows: int, workers: int | tuple[int, int], steps: Sequence[tuple[int, float]]
) -> Played:
    """Run steps of (batches, compute seconds)."""
    load = Load(source, rows, workers)
    played = Played()
    with load.engine:
        load.step(2, 0.0)  # the first touch of the buffers
        before = load.cpu_s()
        for batches, compute_s in steps:
            played.seconds.append(load.step(batches, compute_s))
            played.workers.append(load.engine.stats()["workers"])
        played.cpu_s = load.cpu_s() - before
        played.decisions = load.engine.stats()["decision_count"]
        played.right = load.right
    return played


def measure(report: Record, source: Source, rows: int, seconds: float) -> None:
    """Sweep fixed counts over I/O alone, then compare them with the dynamic count on steps."""
    low, high = source.limits
    nbytes = rows * source.data.shape[1] * 8
    one = play(source, rows, high, [(8, 0.0)])
    io_s = one.seconds[0] / 8
    batches = max(16, int(seconds / io_s))
    counts = sorted({1, low, (low + high + 1) // 2, high, min(source.drives, 2 * high)})
    rates: dict[int, float] = {}
    for count in counts:
        played = play(source, rows, count, [(batches, 0.0)])
        rates[count] = rows * batches / played.seconds[0]
        each = source.drives / count
        told = f", {each:g} drives each" if source.drives > 1 else ""
        report.row(
            f"{source.name}: {count} workers{told}",
            rates[count] / 1e6,
            "M rows/s",
            source.ceiling_name,
            source.ceiling / 1e6,
            checked=played.right,
            paper=_PAPER_12.get(round(each), "") if source.drives > 1 else "",
            footprint=source.data.nbytes,
        )
        report.row(
            f"{source.name}: CPU time, {count} workers{told}",
            played.cpu_s / (rows * batches) * 1e6,
            "s per million rows",
            note="of the workers and the polling thread",
        )
    steps = [(max(32, int(seconds / max(io_s, ratio * io_s))), ratio * io_s) for ratio in _STEPS]
    fixed = {count: play(source, rows, count, steps) for count in counts if low <= count <= high}
    dynamic = play(source, rows, (low, high), steps)
    report.settings.setdefault("steps", {})[source.name] = {
        "batches and compute seconds": steps,
        "dynamic": vars(dynamic),
        "fixed": {count: vars(each) for count, each in fixed.items()},
        "batch_bytes": nbytes,
    }
    total = sum(batches for batches, _ in steps)
    best = min(fixed, key=lambda count: sum(fixed[count].seconds))
    report.row(
        f"{source.name}: steps of compute, dynamic count",
        total / sum(dynamic.seconds),
        "batches/s",
        f"best fixed count, {best},",
        total / sum(fixed[best].seconds),
        0.95,
        dynamic.right and all(each.right for each in fixed.values()),
        note=f"workers at the end of each step: {dynamic.workers}, {dynamic.decisions} decisions",
        footprint=source.data.nbytes,
    )
    report.row(
        f"{source.name}: steps of compute, CPU time, dynamic count",
        dynamic.cpu_s / (rows * total) * 1e6,
        "s per million rows",
        f"{high} workers",
        fixed[high].cpu_s / (rows * total) * 1e6,
    )
    # A count that follows the load down is the fewest there.
    report.row(
        f"{source.name}: the fewest workers",
        low,
        "workers",
        "those of the step with most compute",
        dynamic.workers[_STEPS.index(max(_STEPS))],
        1.0,
    )


def _table(rows: int, row_bytes: int) -> npt.NDArray[np.uint64]:
    """Return rows whose words name themselves."""
    return np.arange(rows * row_bytes // 8, dtype=np.uint64).reshape(rows, -1)


def _drives(
    stack: ExitStack, mib: int, row_bytes: int, drives: int, profile: str, slower: float
) -> Source:
    data = _table((mib << 20) // row_bytes // drives * drives, row_bytes)
    members = [stack.enter_context(Memory(data.nbytes // drives)) for _ in range(drives)]
    striped = stack.enter_context(Striped(members, max(4096, row_bytes), data.nbytes))
    striped.write(0, data)
    model = modelled(profile, slower)
    return Source(
        f"{drives} modelled drives {model.name}",
        striped,
        data,
        drives * model.iops(row_bytes),
        "the drives' ceiling",
        drives,
        fw.SoftwareController(model=model),
        worker_limits(drives),
    )


def _file(
    stack: ExitStack, path: Path, row_bytes: int, data: npt.NDArray[np.uint64], direct: bool
) -> Source:
    if direct:
        disk.drop_page_cache(path)
        name, rate = "the disk's ceiling", disk.measure_ceiling(path, row_bytes).random_reads_per_s
    else:
        disk.fill_page_cache(path)
        name, rate = "copies by one thread", _copies_per_s(data)
    storage = stack.enter_context(File(path, o_direct=direct))
    limits = (1, max(2, min(8, cores() // 2)))
    return Source(
        "file, O_DIRECT" if direct else "file, page cache", storage, data, rate, name, 1, None,
        limits,
    )  # fmt: skip


def _copies_per_s(data: npt.NDArray[np.uint64]) -> float:
    """Return the rate at which numpy gathers rows."""
    ids = np.random.default_rng(2).integers(0, len(data), 1 << 14)
    out = np.empty((len(ids), data.shape[1]), np.uint64)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        np.take(data, ids, axis=0, out=out)
        taken.append(time.perf_counter() - start)
    return len(ids) / min(taken)


def run(
    folder: Path,
    drives: Annotated[int, "Modelled drives, 4 to 16."] = 12,
    profile: Annotated[str, "The drives: a name of SSDModel.names()."] = "P5510",
    slower: Annotated[float, "Divides their ceilings; 0: by the cores."] = 0,
    rows: Annotated[int, "Rows of a batch."] = 4096,
    row_bytes: Annotated[int, "Bytes of a row, a multiple of 512."] = 4096,
    mib: Annotated[int, "Size of the data in MiB."] = 256,
    seconds: Annotated[float, "About how long each step takes."] = 1.0,
) -> Record:
    """Measure all sources; needs twice `mib` of memory, and `mib` of disk."""
    if not 4 <= drives <= 16:
        raise ArgumentError(f"drives={drives} is not between 4 and 16")
    if row_bytes < 512 or row_bytes % 512:
        raise ArgumentError(f"row_bytes={row_bytes} is not a multiple of 512")
    if rows < 1 or mib < 1 or not 0 < seconds <= 60:
        raise ArgumentError("rows and mib are positive, and seconds is 60 at most")
    # A few cores cannot keep up with many drives at full speed.
    slower = slower or max(1.0, 16.0 / cores())
    settings: dict[str, Any] = {
        "drives": drives,
        "profile": profile,
        "slower": slower,
        "rows": rows,
        "row_bytes": row_bytes,
        "mib": mib,
        "seconds": seconds,
        "compute over I/O": list(_STEPS),
    }
    report = Record(
        title="Workers of the engine of batches (modelled drives are models, not measurements)",
        device=CpuDevice().describe(),
        settings=settings,
        seeds={"rows": 1, "drives": 1},
    )
    with ExitStack() as stack:
        measure(report, _drives(stack, mib, row_bytes, drives, profile, slower), rows, seconds)
    data = _table((mib << 20) // row_bytes, row_bytes)
    path = folder / "workers.bin"
    data.tofile(path)
    try:
        for direct in (True, False):
            if direct and not disk.direct_reads_work(path):
                report.settings["O_DIRECT"] = "not possible in this folder"
                continue
            with ExitStack() as stack:
                measure(report, _file(stack, path, row_bytes, data, direct), rows, seconds)
    finally:
        path.unlink()
    return report
