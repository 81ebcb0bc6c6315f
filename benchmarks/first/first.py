"""What happens once: first calls of a process, restarts after a crash, and arrays at rest.

Each measurement has a process of its own, whose import and context are there before the clock
starts. Beside a first call stands the third one of the same kind; beside a restart from the disk
the disk's own reads, and beside one from the page cache a load of as many bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, bytes_of, listed
from benchmarks.checkpoints.state import blocked, ends_are, finish, new_array
from flashwarp.config import parse_bytes
from flashwarp.device import resolve
from flashwarp.probe import disk
from flashwarp.probe.timing import wall_seconds

__all__ = ["run"]

_PARTS = ("calls", "checkpoints", "restarts", "idle")
# What this project accepts: the third call over the first, and shares of the ceilings.
_OF_THIRD, _OF_DISK, _OF_LOAD = 1 / 1.5, 0.9, 0.9
_CLOSE_S = 0.2
_VALUE = 7
_ROW = 1024
_FEW = 32
_SETTLES_S = 1.5
_KINDS = {"in place": [False], "O_DIRECT": [True], "half of each": [False, True]}


def run(
    device: str | None,
    folder: Path,
    parts: Annotated[str, f"Of {', '.join(_PARTS)}, with commas."] = ",".join(_PARTS),
    state: Annotated[str, "Bytes of a state; empty: 4 GiB, 4 MiB on the CPU device."] = "",
    caches: Annotated[str, "Sizes of both caches of a restart, in states."] = "4,1.1",
    data: Annotated[str, "Bytes of what first calls read."] = "64 MiB",
    arrays: Annotated[str, "How many arrays rest at a time."] = "1,2,16",
    runs: Annotated[int, "Processes of each measurement; the median counts."] = 3,
    seconds: Annotated[float, "How long arrays rest."] = 3.0,
) -> Record:
    """Time first calls, restarts of a new process, and the processor time of arrays at rest."""
    where = resolve(device)
    nbytes = bytes_of(where, state, "4 GiB", "4 MiB")
    report = Record(
        "First times",
        where.describe(),
        {"state": nbytes, "caches": caches, "data": data, "arrays": arrays, "runs": runs,
         "seconds": seconds},
        {},
    )  # fmt: skip
    bench = _First(report, where.name, folder, nbytes, runs)
    wanted = listed("parts", parts, _PARTS)
    if "calls" in wanted:
        with report.part("calls"):
            bench.calls(parse_bytes(data))
    if "checkpoints" in wanted:
        with report.part("checkpoints"):
            bench.checkpoints()
    if "restarts" in wanted:
        for times in (float(each) for each in listed("caches", caches)):
            with report.part(f"restarts, caches of {times:g} states"):
                bench.restarts(times)
    if "idle" in wanted:
        with report.part("idle"):
            bench.idle([int(each) for each in listed("arrays", arrays)], seconds)
    return report


class _First:
    def __init__(self, report: Record, device: str, folder: Path, nbytes: int, runs: int) -> None:
        self.report, self.device, self.folder = report, device, folder
        self.nbytes, self.runs = nbytes, runs

    def several(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call in so many processes, one after the other."""
        return [_alone(call, *arguments) for _ in range(self.runs)]

    def calls(self, nbytes: int) -> None:
        """The first, second and third array, gather, batch and load of a process."""
        path = self.folder / "rows.npy"
        np.save(path, np.arange(nbytes // 4, dtype=np.uint32).reshape(-1, _ROW))
        found = self.several(_first_calls, self.device, path)
        for name in found[0]:
            firsts, thirds = (sorted(each[name][0][turn] for each in found) for turn in (0, 2))
            self.report.row(
                f"the first {name} of a process",
                median(firsts) * 1e3,
                "ms",
                "the third",
                median(thirds) * 1e3,
                checked=all(each[name][1] for each in found),
                note=f"{firsts[0] * 1e3:.3g} to {firsts[-1] * 1e3:.3g} ms",
            )

    def checkpoints(self) -> None:
        """The first three checkpoints of a process that begins at once."""
        found = self.several(_checkpoints, self.device, self.folder / "new", self.nbytes)
        calls = sorted(each["calls"] for each in found)
        first, third = (median(each[turn] for each in calls) for turn in (0, 2))
        self.report.row(
            "the third checkpoint over the first",
            third / first,
            "",
            "1",
            1.0,
            _OF_THIRD,
            checked=all(each["right"] for each in found),
            note=f"of {self.nbytes} bytes; calls blocked "
            + "; ".join(", ".join(f"{1e3 * s:.2f}" for s in each) for each in calls)
            + " ms; the checkpointer was made in "
            + ", ".join(f"{1e3 * each['made']:.0f}" for each in found)
            + " ms and closed in "
            + ", ".join(f"{1e3 * each['closed']:.0f} ms" for each in found),
        )

    def restarts(self, times: float) -> None:
        """A process that begins with the newest version, from the disk and from the page cache."""
        place = self.folder / "restarts"
        caches = int(times * self.nbytes)
        _alone(_written, self.device, place, self.nbytes, caches)
        path = max(place.rglob("*"), key=lambda each: each.stat().st_size)
        other = self.folder / "other.npy"
        np.save(other, np.full(self.nbytes, _VALUE, np.uint8))
        for cold in (True, False):
            found, ceilings = [], []
            for _ in range(self.runs):
                if cold:
                    disk.drop_page_cache(path)
                    ceilings.append(disk.measure_ceiling(path, 4096).sequential_gb_per_s)
                    disk.drop_page_cache(path)
                else:
                    disk.fill_page_cache(path)
                    disk.fill_page_cache(other)
                found.append(_alone(_restarted, self.device, place, self.nbytes, caches))
                if not cold:
                    ceilings.append(self.nbytes / _alone(_loaded, self.device, other) / 1e9)
            rates = sorted(self.nbytes / each["restart"] / 1e9 for each in found)
            self.report.row(
                f"restart from the {'disk' if cold else 'page cache'}, caches of {times:g} states",
                median(rates),
                "GB/s",
                "disk, 8 reads of 1 MiB in flight" if cold else "fw.load of as many bytes",
                median(ceilings),
                _OF_DISK if cold else _OF_LOAD,
                all(each["right"] for each in found),
                note=f"{rates[0]:.3g} to {rates[-1]:.3g} GB/s, from the making of the "
                "checkpointer on, which took "
                + ", ".join(f"{1e3 * each['made']:.0f} ms" for each in found),
                footprint=self.nbytes,
            )
            self.report.row(
                f"the close after it, {'disk' if cold else 'page cache'}, {times:g} states",
                median(each["close"] for each in found),
                "s",
                "accepted",
                _CLOSE_S,
            )
        shutil.rmtree(place)
        other.unlink()

    def idle(self, counts: list[int], seconds: float) -> None:
        """The processor time that open arrays take of which nobody reads."""
        path = self.folder / "rest.npy"
        np.save(path, np.zeros((4096, _ROW), np.uint32))
        direct = disk.direct_reads_work(path)
        for count in counts:
            for way, kinds in _KINDS.items():
                if (len(kinds) > count) or (True in kinds and not direct):
                    continue
                each = [kinds[place % len(kinds)] for place in range(count)]
                found = self.several(_rested, self.device, path, each, seconds)
                self.report.row(
                    f"{count} open array{'s' * (count > 1)} at rest, {way}",
                    100 * median(found),
                    "% of a core",
                    "accepted",
                    min(0.3 * count, 1.0),
                    note=f"{100 * min(found):.2f} to {100 * max(found):.2f}",
                )


def _alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, and raise what it raises."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(call, *arguments).result()


def _begin(device: str) -> Any:
    """Make the context of a process, and load what calls are made with."""
    where = resolve(device)
    new_array(where, 4096)
    finish(where)
    return where


def _first_calls(device: str, path: Path) -> dict[str, tuple[list[float], bool]]:
    """Return how long the first three calls of each kind took, and whether the data was right."""
    where = _begin(device)
    times: dict[str, list[float]] = {name: [] for name in ("open", "gather", "batch", "load")}
    right = dict.fromkeys(times, True)
    with contextlib.ExitStack() as held:
        for turn in range(3):
            with _timed(times["open"]):
                array = held.enter_context(fw.open(path, device=where))
            index = np.arange(_FEW) + 2 * _FEW * turn
            with _timed(times["gather"]):
                rows = array.gather(index)
            right["gather"] &= _starts_are(rows, index)
            with _timed(times["batch"]):
                pipeline = held.enter_context(fw.Pipeline(array, _FEW, library=_library(where)))
                pipeline.prefetch(index)
                batch = pipeline.take()
                finish(where)
            right["batch"] &= _starts_are(batch, index)
        for _ in range(3):
            with _timed(times["load"]):
                loaded = fw.load(path, where, library=_library(where))
            right["load"] &= _starts_are(loaded[path.stem][-_FEW:], _last(path))
            del loaded
    return {name: (found, right[name]) for name, found in times.items()}


@contextlib.contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times.append(time.perf_counter() - began)


def _library(device: Any) -> str:
    return "torch" if device.kind == "cuda" else "numpy"


def _last(path: Path) -> Any:
    rows = len(np.load(path, mmap_mode="r"))
    return np.arange(rows - _FEW, rows)


def _starts_are(rows: Any, index: Any) -> bool:
    """Return whether each row begins with the number of its first element."""
    first = rows[:, 0]
    first = first.cpu().numpy() if hasattr(first, "cpu") else np.asarray(first)
    return bool((first.view(np.uint32) == index * _ROW).all())


def _checkpoints(device: str, place: Path, nbytes: int) -> dict[str, Any]:
    """Make a checkpointer and three checkpoints, each when the last one is durable."""
    where = _begin(device)
    state = new_array(where, nbytes)
    calls, right = [], True
    try:
        began = time.perf_counter()
        made = fw.Checkpointer(place, where, 2 * nbytes, 2 * nbytes)
        made_s = time.perf_counter() - began
        made.protect("state", state)
        for number in range(3):
            state[:] = number + 1
            calls.append(blocked(where, partial(made.checkpoint, number)))
            state[:] = 0
            made.wait(number)
        for number in range(3):
            made.restart(number)
            finish(where)
            right &= ends_are(state, number + 1)
        return {"made": made_s, "calls": calls, "right": right, "closed": wall_seconds(made.close)}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _written(device: str, place: Path, nbytes: int, caches: int) -> None:
    """Leave one durable version."""
    where = _begin(device)
    state = new_array(where, nbytes)
    state[:] = _VALUE
    with fw.Checkpointer(place, where, caches, caches) as made:
        made.protect("state", state)
        made.checkpoint(1)
        made.wait(1)


def _restarted(device: str, place: Path, nbytes: int, caches: int) -> dict[str, Any]:
    """Restart with the version."""
    where = _begin(device)
    state = new_array(where, nbytes)
    finish(where)
    began = time.perf_counter()
    made = fw.Checkpointer(place, where, caches, caches)
    made_s = time.perf_counter() - began
    made.protect("state", state)
    made.restart(1)
    finish(where)
    restart_s = time.perf_counter() - began
    right = ends_are(state, _VALUE) and int(state.min()) == int(state.max()) == _VALUE
    close_s = wall_seconds(made.close)
    return {"made": made_s, "restart": restart_s, "right": right, "close": close_s}


def _loaded(device: str, path: Path) -> float:
    """Load a file of as many bytes; return the seconds."""
    where = _begin(device)
    began = time.perf_counter()
    held = fw.load(path, where, library=_library(where))
    finish(where)
    seconds = time.perf_counter() - began
    del held
    return seconds


def _rested(device: str, path: Path, direct: list[bool], seconds: float) -> float:
    """Return the share of a core that a process takes, with arrays that have been used."""
    where = _begin(device)
    with contextlib.ExitStack() as held:
        for each in direct:
            array = fw.open(path, device=where, cache="1 MiB", o_direct=each)
            held.enter_context(array).gather(np.arange(_FEW))
        time.sleep(_SETTLES_S)
        before, began = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return (time.process_time() - before) / (time.monotonic() - began)
