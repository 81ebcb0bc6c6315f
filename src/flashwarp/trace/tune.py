"""Tuning: which cache, line, policy, route and threads suit the accesses to a file.

What a hit and a miss cost is measured on the file itself, by line and route. How often each happens
is replayed. The choice with the best product is then run against the defaults, and so is the line
that fits a row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp import config
from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.array.profile import Profile
from flashwarp.cache.sizes import LINE_BYTES_MIN, LINE_DEFAULT, check_line
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError, PathError
from flashwarp.policy import POLICIES
from flashwarp.probe.report import Report, Row
from flashwarp.probe.text import binary
from flashwarp.trace.format import Trace
from flashwarp.trace.record import trace_of_indices
from flashwarp.trace.replay import replay

_LINE = check_line(LINE_DEFAULT)
_LINES = (512, 4 << 10, 16 << 10, 64 << 10)
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_WAYS = 4
_COST_S = 0.3
_TURNS = 2
# The least gain for which a setting departs from its default, and a cache grows.
_GAIN_MIN = 1.03
_SEED = 1

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Costs:
    """Seconds of a line access, by line size and route."""

    hit: float
    misses: dict[tuple[int, bool], float]

    def best(self, line: int) -> tuple[bool, float]:
        """Return whether O_DIRECT is better for misses of this size, and their seconds."""
        found = {direct: s for (size, direct), s in self.misses.items() if size == line}
        direct = min(found, key=lambda each: found[each])
        return direct, found[direct]

    def seconds(self, hits: int, misses: int, line: int) -> float:
        return hits * self.hit + misses * self.best(line)[1]


def tune(
    path: str | os.PathLike[str],
    trace: Trace | None = None,
    *,
    device: str = "cpu",
    cache_max: int | None = None,
    accesses: int = 50_000,
    call_rows: int = 64,
    **opening: Any,
) -> tuple[Profile, Report]:
    """Choose settings for the accesses of a trace to a file, or for random rows of it.

    Parameters
    ----------
    path : path-like
        As for `flashwarp.open`; it is only read.
    trace : Trace, optional
        Recorded from an array of this file. Default: random rows.
    device : str
        Where arrays will be opened.
    cache_max : int, optional
        Most bytes of cache. Default: what ``cache="auto"`` takes.
    accesses : int
        Of a longer trace, as many from its start count.
    call_rows : int
        Rows of a call.
    **opening
        For `flashwarp.open`: `dtype`, `shape`, `tensor`.

    Returns
    -------
    Profile, Report
        The choice, and its record, with predicted and measured rows per second. Its title is the
        verdict.
    """
    opening |= {"device": device}
    with open_array(path, **opening) as x:
        if not x.ndim or not x.nbytes:
            raise ArgumentError(f"{os.fspath(path)} has no rows: its shape is {x.shape}")
        rows = _rows_of(trace, x, accesses)
        facts = Profile(x.dtype.str, x.shape, x.device.kind)
        row_bytes, most = x.nbytes // x.shape[0], cache_max or x.cache.capacity
    base = replace(facts, cache=most, line=_LINE)
    run = _Runs(path, opening, rows, call_rows)
    costs = run.costs(base, [each for each in _LINES if each * _WAYS <= most], row_bytes)
    chosen, predicted = _choose(base, rows, row_bytes, costs)
    chosen = run.with_threads(chosen)
    defaults = facts if cache_max is None else replace(facts, cache=most)
    # In turns, because disks drift.
    tried = [defaults, chosen]
    fit = max(LINE_BYTES_MIN, 1 << (row_bytes - 1).bit_length())  # as `explain` advises it
    if 2 * fit <= _LINE and fit in {line for line, _ in costs.misses}:
        tried.append(replace(defaults, line=fit))
    turns = [[run.rows_per_s(each) for each in tried] for _ in range(_TURNS)]
    before, *after = (max(each) for each in zip(*turns, strict=True))
    as_is = replay(_lines(rows, row_bytes, _LINE), capacity_lines=_frames(base), ways=_WAYS)
    gain = costs.seconds(as_is.hits, as_is.misses, _LINE) / predicted
    measured = max(after)
    best = tried[1 + after.index(measured)]
    told = f"predicted {gain:.2f}, measured" if best is chosen else "measured"
    told = f"{_settings(best)}: {told} {measured / before:.2f}"
    if measured >= _GAIN_MIN * before:
        title = f"chosen: {told} times the rows/s of the defaults"
    else:
        title = f"the defaults stay: no candidate was 3 % faster when measured (best: {told})"
        best = defaults
    report = Report(title, resolve(device).describe(), asdict(best), {"rows": _SEED})
    report.rows.append(Row("the defaults", before, "rows/s"))
    names = ("the choice, predicted", "the choice, measured", f"line={fit}, measured")
    for name, value in zip(names, (before * gain, *after), strict=False):
        report.rows.append(Row(name, value, "rows/s", "the defaults", before))
    return best, report


def _settings(profile: Profile) -> str:
    """Name the settings that depart from those of a file, as a user writes them."""
    sizes = [f"{name} {binary(n)}" for name in ("cache", "line") if (n := getattr(profile, name))]
    policy = [f"policy {profile.policy}"] if profile.cache else []
    found = {"o_direct": profile.o_direct, "threads": profile.threads}
    others = [f"{name}={each}" for name, each in found.items() if each is not None]
    return ", ".join([*sizes, *policy, *others]) or "as they are"


def _rows_of(trace: Trace | None, x: Array, accesses: int) -> Rows:
    if trace is None:
        return np.random.default_rng(_SEED).integers(0, x.shape[0], accesses)
    if not len(trace):
        raise ArgumentError("the trace is empty: record calls that read rows")
    form = f"shape={x.shape} dtype={x.dtype} "
    if trace.name.startswith("<flashwarp.Array") and form not in trace.name:
        raise ArgumentError(
            f"the trace is of {trace.name}, the file has {form.strip()}: record one of this file"
        )
    last = int(trace.lines.max())
    if last * trace.line_bytes >= x.nbytes:
        raise ArgumentError(
            f"the trace touches line {last} of {trace.line_bytes} bytes, and the file has "
            f"{x.nbytes} bytes: the trace is of another file; record one of this file"
        )
    found = trace.lines[:accesses] * trace.line_bytes // (x.nbytes // x.shape[0])
    # The lines of a long row follow one another.
    return np.asarray(found[np.r_[True, found[1:] != found[:-1]]], np.int64)


def _lines(rows: Rows, row_bytes: int, line: int) -> Trace:
    return trace_of_indices(rows, row_bytes, line_bytes=line)


def _frames(profile: Profile) -> int:
    return max(_WAYS, (profile.cache or 0) // (profile.line or _LINE))


def _choose(base: Profile, rows: Rows, row_bytes: int, costs: _Costs) -> tuple[Profile, float]:
    """Choose line and cache under clock, then the policy; returns the predicted seconds, too."""
    found: list[tuple[float, Profile]] = []
    for line in sorted({line for line, _ in costs.misses}):
        lines = _lines(rows, row_bytes, line)
        for share in _SHARES:
            nbytes = min(base.cache or 0, int(share * lines.footprint + 2 * _WAYS) * line)
            each = replace(base, cache=max(nbytes, _WAYS * line), line=line)
            done = replay(lines, capacity_lines=_frames(each), ways=_WAYS)
            each = replace(each, o_direct=costs.best(line)[0])
            found.append((costs.seconds(done.hits, done.misses, line), each))
    least = min(seconds for seconds, _ in found)
    near = [each for each in found if each[0] <= _GAIN_MIN * least]
    seconds, chosen = min(near, key=lambda each: each[1].cache or 0)
    line = chosen.line or _LINE
    lines = _lines(rows, row_bytes, line)
    for policy in POLICIES:
        done = replay(lines, policy, capacity_lines=_frames(chosen), ways=_WAYS)
        found_s = costs.seconds(done.hits, done.misses, line)
        if found_s * _GAIN_MIN < seconds:
            seconds, chosen = found_s, replace(chosen, policy=policy)
    return chosen, seconds


@dataclass(frozen=True)
class _Runs:
    """Runs of the accesses on the file itself."""

    path: str | os.PathLike[str]
    opening: dict[str, Any]
    rows: Rows
    call_rows: int

    def rows_per_s(self, profile: Profile) -> float:
        """Gather all rows with these settings, from an empty cache."""
        with self._open(profile) as x:
            began = time.perf_counter()
            for part in self._calls(self.rows):
                x.gather(part)
            return len(self.rows) / (time.perf_counter() - began)

    def costs(self, base: Profile, lines: list[int], row_bytes: int) -> _Costs:
        """Measure what a miss costs by line and route, and a hit."""
        misses, hit = {}, 0.0
        for line in lines or [_LINES[0]]:
            for direct in (False, True):
                small = replace(base, cache=_WAYS * line, line=line, o_direct=direct)
                try:
                    misses[line, direct] = self._cost(small, row_bytes, "misses")
                except PathError:  # the file system has no O_DIRECT
                    continue
        hit = self._cost(replace(base, cache=max(base.cache or 0, 1 << 20)), row_bytes, "hits")
        return _Costs(min(hit, *misses.values()), misses)

    def _cost(self, profile: Profile, row_bytes: int, what: str) -> float:
        """Return seconds of a line access: of misses anywhere, or of hits on few rows."""
        most = max(1, min(self.call_rows, (64 << 10) // row_bytes)) if what == "hits" else None
        rows = np.arange(most) % self._count if most else self._anywhere
        with self._open(profile) as x:
            if most:
                x.gather(rows)
            before, began = x.stats, time.perf_counter()
            for part in self._calls(np.tile(rows, 200) if most else rows):
                x.gather(part)
                if time.perf_counter() - began > _COST_S:
                    break
            seconds, after = time.perf_counter() - began, x.stats
        done = after.hits + after.misses - before.hits - before.misses
        return seconds / max(1, done)

    def with_threads(self, chosen: Profile) -> Profile:
        """Try numbers of serving threads, if disks are waited for."""
        if not chosen.o_direct:
            return chosen
        counts = (None, 1, 2, config.cores())
        tried = {each: self.rows_per_s(replace(chosen, threads=each)) for each in counts}
        best = max(tried, key=lambda each: tried[each])
        return replace(chosen, threads=best) if tried[best] > _GAIN_MIN * tried[None] else chosen

    @property
    def _count(self) -> int:
        return int(self.rows.max()) + 1

    @property
    def _anywhere(self) -> Rows:
        return np.random.default_rng(_SEED).integers(0, self._count, 1 << 16)

    def _calls(self, rows: Rows) -> Iterator[Rows]:
        for first in range(0, len(rows), self.call_rows):
            yield rows[first : first + self.call_rows]

    def _open(self, profile: Profile) -> Array:
        return open_array(self.path, **self.opening, **profile.options())
