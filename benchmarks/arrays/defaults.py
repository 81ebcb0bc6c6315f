"""What `o_direct=` is by default, beside both choices, over sizes and uses of a file.

Files from a small one to twice the memory are read and updated, at random and in order, freshly
created, cold and warm. Each way has its turn in each use, in a process whose memory is made small.
The figure is the default's, against the better of the two ways that were forced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.base import Record, listed
from benchmarks.small_memory import events_of, small_group
from flashwarp.config import parse_bytes
from flashwarp.device import host_memory, resolve
from flashwarp.probe.disk import drop_page_cache, fill_page_cache, measure_ceiling
from flashwarp.probe.report import Row
from flashwarp.storage.npy import DATA_OFFSET, empty_layout, write_empty

__all__ = ["run"]

_COLUMNS = 512
_ROW_BYTES = 8 * _COLUMNS
_ROWS_OF_A_CALL = 2048
_ROWS_MADE_AT_ONCE = 2048
_ROWS_CHECKED = 512
_OPTIONS = ("memory", "sizes", "cache", "epochs", "runs", "seconds")
_TARGET = 0.9
# How the default ended; where it is the better way, a ratio below 1 is what turns differ by.
_BETTER, _OTHER = "took the better way", "took the other way"
_WAYS: dict[str, bool | None] = {"o_direct=True": True, "o_direct=False": False, "default": None}


@dataclass(frozen=True)
class _Use:
    """What is done with a file; `state` is its own when it is opened."""

    state: str
    kind: str

    @property
    def writes(self) -> bool:
        return "update" in self.kind

    def __str__(self) -> str:
        return f"{self.state}, {self.kind}"


_USES = (
    _Use("cold", "random reads"),
    _Use("cold", "reads in order"),
    _Use("warm", "random reads"),
    _Use("cold", "random updates"),
    _Use("fresh", "random updates"),
    _Use("fresh", "updates in order"),
)


@dataclass(frozen=True)
class _Plan:
    """Settings of the measuring process."""

    device: str
    folder: str
    nbytes: int
    room: int
    cache_share: int
    epochs: int
    runs: int
    seconds: float


def run(
    device: str | None,
    folder: Path,
    memory: Annotated[str, "Memory of the measuring process; empty: the machine's."] = "384 MiB",
    sizes: Annotated[str, "Sizes of the file, as shares of the memory or in bytes."] = (
        "50 MB,0.25,0.6,1,2"
    ),
    cache: Annotated[int, "The cache of the array is one in so many of the file."] = 8,
    epochs: Annotated[int, "How often each use goes over the file, at least 2."] = 2,
    runs: Annotated[int, "How often each way has its turn; the best counts."] = 2,
    seconds: Annotated[float, "Most seconds of an epoch; what was done in them counts."] = 2.0,
) -> Record:
    """Compare the default with both ways over sizes and uses of a file."""
    where = resolve(device)
    given = locals()
    options = {name: given[name] for name in _OPTIONS}
    report = Record(
        title="Page cache or O_DIRECT: the default against both",
        device=where.describe(),
        settings={
            **options,
            "row_bytes": _ROW_BYTES,
            "rows_of_a_call": _ROWS_OF_A_CALL,
        },
        seeds={"rows": 0},
    )
    limit = parse_bytes(memory) if memory else 0
    with small_group(limit) if limit else nullcontext() as group:
        if limit and group is None:
            report.settings["memory"] = "the machine's: no memory control group can be made here"
        room = limit if group is not None else host_memory.available_bytes()
        report.settings["memory_bytes"] = room
        for text in listed("sizes", sizes):
            nbytes = _size(text.strip(), room)
            plan = _Plan(
                where.name, str(folder), nbytes, room, cache, max(2, epochs), runs, seconds
            )
            for row in events_of(_measure, (plan,), group):
                report.add(row)
    _summarize(report)
    return report


def _summarize(report: Record) -> None:
    compared = [row for row in report.rows if row.target]
    good = sum(row.ratio >= _TARGET for row in compared)
    same = sum(row.note.startswith(_BETTER) for row in compared)
    report.row(f"figures of {len(compared)} with {_TARGET} of the better way", good, "")
    report.row(f"figures of {len(compared)} where the default took it", same, "")


def _size(text: str, room: int) -> int:
    """Parse a size, or a share of the memory, as whole rows."""
    try:
        nbytes = int(float(text) * room)
    except ValueError:
        nbytes = parse_bytes(text)
    return nbytes // _ROW_BYTES * _ROW_BYTES


# In the measuring process.


def _measure(plan: _Plan) -> Iterator[Row]:
    """Yield the rows of one size of the file."""
    path = Path(plan.folder) / "table.npy"
    name = _name(plan.nbytes)
    rows = plan.nbytes // _ROW_BYTES
    _make(path, rows)
    yield from _ceilings(plan, path, rows, name)
    for use in _USES:
        yield from _compare(plan, use, path, rows, name)
    path.unlink(missing_ok=True)


def _name(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def _make(path: Path, rows: int) -> None:
    """Write rows that hold their numbers."""
    with path.open("w+b") as file:
        write_empty(file.fileno(), empty_layout((rows, _COLUMNS), np.int64))
        file.seek(DATA_OFFSET)
        for first in range(0, rows, _ROWS_MADE_AT_ONCE):
            part = np.arange(first, min(rows, first + _ROWS_MADE_AT_ONCE), dtype=np.int64)
            file.write(np.repeat(part, _COLUMNS).tobytes())
    drop_page_cache(path)


def _ceilings(plan: _Plan, path: Path, rows: int, name: str) -> Iterator[Row]:
    """Measure what the drive gives to anybody, and what numpy gives from the page cache."""
    drive = measure_ceiling(path, _ROW_BYTES, min(1.0, plan.seconds))
    if drive.random_reads_per_s:
        yield Row(
            f"{name}: the drive, random rows",
            drive.random_reads_per_s,
            "rows/s",
            footprint=plan.nbytes,
        )
        in_order = drive.sequential_gb_per_s * 1e9 / _ROW_BYTES
        yield Row(
            f"{name}: the drive, in order",
            in_order,
            "rows/s",
            note=drive.note,
            footprint=plan.nbytes,
        )
    if 2 * plan.nbytes > plan.room:
        # It waits for one page at a time.
        return
    fill_page_cache(path)
    mapped = np.load(path, mmap_mode="r")
    index = np.random.default_rng(0).integers(0, rows, min(rows, 16 * _ROWS_OF_A_CALL))
    start = time.perf_counter()
    for part in np.array_split(index, 16):
        mapped[part]
    seconds = time.perf_counter() - start
    del mapped
    yield Row(
        f"{name}: numpy.memmap, warm random rows",
        len(index) / seconds,
        "rows/s",
        footprint=plan.nbytes,
    )


def _compare(plan: _Plan, use: _Use, path: Path, rows: int, name: str) -> Iterator[Row]:
    best: dict[str, list[float]] = {way: [0.0, 0.0] for way in _WAYS}
    right = True
    told = ""
    for turn in range(plan.runs):
        for way in list(_WAYS)[:: 1 if turn % 2 == 0 else -1]:
            epochs, good, explained = _Turn(plan, use, path, rows).take(_WAYS[way])
            best[way][0] = max(best[way][0], epochs[0])
            best[way][1] = max(best[way][1], *epochs[1:])
            right = right and good
            told = explained if way == "default" else told
    for n, epoch in enumerate(("first epoch", "later epochs")):
        forced = {way: best[way][n] for way in list(_WAYS)[:2]}
        better = max(forced, key=lambda way: forced[way])
        other = min(forced.values())
        same = told.startswith("O_DIRECT") == (better == "o_direct=True")
        yield Row(
            f"{name}, {use}: {epoch}",
            best["default"][n],
            "rows/s",
            better,
            forced[better],
            target=_TARGET,
            checked=right,
            note=f"{_BETTER if same else _OTHER}, {told}; the other has {other:.4g}",
            footprint=plan.nbytes,
        )


class _Turn:
    """One way's turn in one use of the file."""

    def __init__(self, plan: _Plan, use: _Use, path: Path, rows: int) -> None:
        self._plan = plan
        self._use = use
        self._path = path
        self._rows = rows
        self._stored = np.zeros(rows, np.int64)
        self._good = True

    def take(self, o_direct: bool | None) -> tuple[list[float], bool, str]:
        """Return rows per second of each epoch, whether all were right, and what the way was."""
        with self._open(o_direct) as x:
            speeds = [self._epoch(x, number) for number in range(self._plan.epochs)]
            facts = x.explain().storage
        told = "O_DIRECT" if facts["o_direct"] else "page cache"
        if "changed" in facts:
            told += f", changed {facts['changed']}"
        if self._use.writes:
            self._check_file()
        if self._use.writes and self._use.state != "fresh":
            _make(self._path, self._rows)
        return speeds, self._good, told

    def _open(self, o_direct: bool | None) -> fw.Array:
        options: dict[str, Any] = {
            "device": self._plan.device,
            "o_direct": o_direct,
            "cache": max(1 << 20, self._plan.nbytes // self._plan.cache_share),
        }
        if self._use.state == "fresh":
            self._path.unlink(missing_ok=True)
            self._stored -= np.arange(self._rows)
            return fw.create(self._path, np.int64, (self._rows, _COLUMNS), **options)
        drop_page_cache(self._path)
        if self._use.state == "warm":
            fill_page_cache(self._path)
        return fw.open(self._path, "r+" if self._use.writes else "r", **options)

    def _epoch(self, x: fw.Array, number: int) -> float:
        step: Callable[[fw.Array, NDArray[np.int64]], None]
        step = self._update if self._use.writes else self._read
        order = np.arange(self._rows)
        if "random" in self._use.kind:
            order = np.random.default_rng(number).permutation(self._rows)
        start = time.perf_counter()
        done = 0
        while done < self._rows and time.perf_counter() - start < self._plan.seconds:
            part = order[done : done + _ROWS_OF_A_CALL]
            step(x, part)
            done += len(part)
        if self._use.writes:
            x.flush()
        return done / (time.perf_counter() - start)

    def _rows_at(self, x: fw.Array, part: NDArray[np.int64]) -> NDArray[np.int64]:
        if "random" in self._use.kind:
            return np.asarray(x.gather(part))
        return np.asarray(x[int(part[0]) : int(part[-1]) + 1])

    def _read(self, x: fw.Array, part: NDArray[np.int64]) -> None:
        found = self._rows_at(x, part)
        self._good &= bool((found[:, 0] == part).all() and (found[:, -1] == part).all())

    def _update(self, x: fw.Array, part: NDArray[np.int64]) -> None:
        found = self._rows_at(x, part)
        expected = part + self._stored[part]
        self._good &= bool((found[:, 0] == expected).all() and (found[:, -1] == expected).all())
        found += 1
        if "random" in self._use.kind:
            x.scatter(part, found)
        else:
            x[int(part[0]) : int(part[-1]) + 1] = found
        self._stored[part] += 1

    def _check_file(self) -> None:
        """Check a sample of the file."""
        sample = np.random.default_rng(9).integers(0, self._rows, _ROWS_CHECKED)
        mapped = np.load(self._path, mmap_mode="r")
        self._good &= bool((mapped[sample] == (sample + self._stored[sample])[:, None]).all())
