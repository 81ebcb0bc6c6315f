"""The part of `bench tables` about processes: what memory one takes, and what two share.

A process offloads the table within limits, and looks rows up in steps. Its memory is compared with
its own, when it had done the same with a small table. A second one then reads the same rows while
the first one still holds the table.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Record
from benchmarks.small_memory import events_of
from benchmarks.tables.file import DATA_OFFSET, write_table
from flashwarp.probe import disk

__all__ = ["Limits", "compare_processes"]

_STEPS, _STEP_ROWS = 32, 1024
_SMALL_ROWS = 4096
_HELD_S = 300.0
# Pinned memory that the driver maps is no resident memory of a process.
_DRIVERS_PAGES = "/dev/nvidiactl"
_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The table, and the memory that a process may use for it."""

    device: str
    path: Path
    rows: int
    row_bytes: int
    ram: int
    gpu: int
    seed: int

    def ids(self, rows: int) -> Any:
        """Return the ids of all steps, for a table of so many rows."""
        drawn = np.random.default_rng(self.seed).integers(0, rows, (_STEPS, _STEP_ROWS))
        return importlib.import_module("torch").from_numpy(drawn)


@dataclass(frozen=True)
class _Done:
    """What a process did and took."""

    seconds: float
    """Of all steps, the first ones that read the table."""
    digest: str
    """Of the rows."""
    path: str
    host: dict[str, int]
    """Growth of its memory in bytes."""
    gpu: int


def compare_processes(report: Record, limits: Limits, small: Path) -> None:
    """Add rows for the memory of a process, and for two that read one table."""
    write_table({small: ["table.weight"]}, _SMALL_ROWS, limits.row_bytes, limits.seed)
    disk.drop_page_cache(limits.path)
    with contextlib.ExitStack() as undo:
        found: list[_Done] = []
        cached: list[float | None] = []
        for _ in range(2):
            events = undo.enter_context(contextlib.closing(events_of(_read, (limits, small), None)))
            found.append(next(events))
            cached.append(disk.resident_fraction(limits.path))
    small.unlink()
    right = [each.digest == _digest(_expected(limits)) for each in found]
    on_gpu = limits.device != "cpu"
    for number, (done, checked) in enumerate(zip(found, right, strict=True), 1):
        held = done.host
        # Pages of the file that are mapped, but not pinned, are the kernel's to reclaim.
        spared = 0 if done.path == "in_place" else held["of the table's pages"]
        taken = held["VmRSS"] + held["pinned beside it"] - spared
        parts = ", ".join(f"{name} {nbytes / _MIB:+.1f}" for name, nbytes in held.items())
        report.row(
            f"process {number}: limit of host memory, {done.path}", limits.ram / _MIB, "MiB",
            "growth of resident and pinned memory",
            max(taken, 1) / _MIB,
            target=1.0, checked=checked, note=f"growth in MiB: {parts}",
        )  # fmt: skip
        if on_gpu:
            report.row(
                f"process {number}: limit of GPU memory", limits.gpu / _MIB, "MiB",
                "growth of the GPU's used memory", max(done.gpu, 1) / _MIB, target=1.0,
                checked=checked,
            )  # fmt: skip
    first, second = (_STEPS * _STEP_ROWS / each.seconds / 1e3 for each in found)
    report.row(
        f"first {_STEPS * _STEP_ROWS} rows of a second process", second, "k rows/s",
        "the first process, from the disk", first, checked=all(right),
        footprint=limits.rows * limits.row_bytes,
    )  # fmt: skip
    alone, both = cached
    if alone is not None and both is not None:
        nbytes = limits.path.stat().st_size
        report.row(
            "page cache that holds the table for two processes", both * nbytes / _MIB, "MiB",
            "for the first process alone", alone * nbytes / _MIB,
        )  # fmt: skip


def _read(limits: Limits, small: Path) -> Iterator[_Done]:
    """Read the small table, then the table, and hold it."""
    torch: Any = importlib.import_module("torch")
    place = limits.device
    rows = torch.zeros((_STEPS, _STEP_ROWS, limits.row_bytes), dtype=torch.bfloat16, device=place)

    def steps(module: Any, ids: Any) -> float:
        start = time.perf_counter()
        for step in range(_STEPS):
            rows[step] = module(ids[step])
        if place != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    ids = [limits.ids(count).to(place) for count in (_SMALL_ROWS, limits.rows)]
    with _offloaded(limits, small, _SMALL_ROWS) as (module, _):
        steps(module, ids[0])
    host, gpu = _host_memory(limits.path), _gpu_memory(torch, place)
    with _offloaded(limits, limits.path, limits.rows) as (module, tables):
        seconds = steps(module, ids[1])
        grown = {name: value - host[name] for name, value in _host_memory(limits.path).items()}
        gpu = _gpu_memory(torch, place) - gpu
        (table,) = tables.report().tables
        yield _Done(seconds, _digest(rows), table.path, grown, gpu)
        threading.Event().wait(_HELD_S)  # the process is ended meanwhile


@contextlib.contextmanager
def _offloaded(limits: Limits, path: Path, rows: int) -> Iterator[tuple[Any, Any]]:
    torch: Any = importlib.import_module("torch")
    with torch.device("meta"):
        table = torch.nn.Embedding(rows, limits.row_bytes, dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"table": table}).eval()
    tables = importlib.import_module("flashwarp.torch").offload(
        model, "table", path, ram=limits.ram, gpu=limits.gpu, device=limits.device
    )
    with tables:
        yield table, tables


def _expected(limits: Limits) -> Any:
    """Return the rows by numpy."""
    torch: Any = importlib.import_module("torch")
    shape = (limits.rows, limits.row_bytes)
    table = np.memmap(limits.path, np.uint8, "r", DATA_OFFSET, shape)
    rows = torch.from_numpy(table[limits.ids(limits.rows).numpy()])
    return rows.view(torch.float8_e4m3fn).to(torch.bfloat16)


def _digest(rows: Any) -> str:
    torch: Any = importlib.import_module("torch")
    return hashlib.sha256(rows.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _host_memory(table: Path) -> dict[str, int]:
    """Return bytes of this process by kind, and those that the driver has pinned beside them."""
    status = Path("/proc/self/status").read_text()
    kinds = re.findall(r"^(VmRSS|RssAnon|RssFile|RssShmem|VmPin|VmLck):\s+(\d+) kB", status, re.M)
    held = {name: int(kib) << 10 for name, kib in kinds}
    held |= {"of the table's pages": 0, "pinned beside it": 0}
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        of, _, lines = area.partition("\n")
        sizes = {
            name: int(kib) << 10 for name, kib in re.findall(r"(?m)^(Size|Rss): +(\d+)", lines)
        }
        if of.endswith(str(table.resolve())):
            held["of the table's pages"] += sizes["Rss"]
        elif of.endswith(_DRIVERS_PAGES):
            held["pinned beside it"] += sizes["Size"] - sizes["Rss"]
    available = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.M)
    if available:
        held["not available on the machine"] = -int(available[1]) << 10
    return held


def _gpu_memory(torch: Any, place: str) -> int:
    if place == "cpu":
        return 0
    free, whole = torch.cuda.mem_get_info(place)
    return int(whole - free)
