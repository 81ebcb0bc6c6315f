"""Many schedules of everything: all scenarios at all warp widths, on as many cores as there are.

The seeds are divided into pieces, each of which is a process of its own. A schedule that fails is
kept with the command that replays it, and the piece goes on behind it.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from flashwarp.errors import ArgumentError
from simulator.simulate import build_program, run_seeds, scenarios

__all__ = ["Exploration", "explore", "seed_of_today"]

# Schedules of each width in a hundred. A warp of 32 lanes takes some 25 times as long as one lane:
# so each width gets a like part of the time.
_SHARES = {1: 80, 4: 15, 32: 5}
# Pieces that each core gets of a width: the last one to end is short.
_PIECES = 16
# Failures that are kept; a mistake in the headers would fill the memory with reports.
_FAILURES_MAX = 20
_SEEDS_OF_A_DAY = 1_000_000_000


@dataclass
class Exploration:
    """What was explored.

    Attributes
    ----------
    seeds : dict
        By width: the first seed, and the one after the last. Each seed is one schedule of each
        scenario, in either memory and with one of the strategies, as the seed has it.
    schedules : dict
        By width: how many were run.
    seconds : float
        Wall-clock time, without compiling.
    failures : list of str
        Reports with the commands that replay them; at most 20, and then the exploration ends.
    """

    seeds: dict[int, tuple[int, int]]
    schedules: dict[int, int] = field(default_factory=lambda: dict.fromkeys(_SHARES, 0))
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        widths = "; ".join(
            f"width {width}: {self.schedules[width]} schedules, seeds {first}:{last}"
            for width, (first, last) in self.seeds.items()
        )
        return (
            f"{sum(self.schedules.values())} schedules in {self.seconds:.0f} s, "
            f"{len(self.failures)} failures; {widths}"
        )


def seed_of_today() -> int:
    """Return a first seed that no other day has."""
    day = datetime.datetime.now(datetime.UTC).date()
    return int(day.strftime("%Y%m%d")) * _SEEDS_OF_A_DAY


def explore(
    schedules: int,
    *,
    jobs: int | None = None,
    first_seed: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Exploration:
    """Run at least this many schedules, divided among the widths; blocks until all have run.

    Parameters
    ----------
    schedules : int
        Of all widths together.
    jobs : int, optional
        Processes at a time; default one a core.
    first_seed : int, optional
        Default `seed_of_today`.
    progress : callable, optional
        Called in the calling thread with a line of text now and then, and with each failure.

    Returns
    -------
    Exploration
        Also where schedules have failed.

    Raises
    ------
    ArgumentError
        Less than one schedule or job.
    CompileError
        g++ is missing.
    """
    jobs = os.cpu_count() or 1 if jobs is None else jobs
    if schedules < 1 or jobs < 1:
        raise ArgumentError(f"{schedules} schedules by {jobs} jobs: at least one each")
    first = seed_of_today() if first_seed is None else first_seed
    # Each width its own seeds: what one has shown, another need not show again.
    each = len(scenarios().splitlines())
    found = Exploration(seeds={})
    for width, share in _SHARES.items():
        last = first + -(-schedules * share // (100 * each))
        found.seeds[width] = (first, last)
        first = last
    programs = {width: build_program(None, width=width) for width in _SHARES}
    start = time.monotonic()

    def run(width: int, begin: int, end: int) -> tuple[int, int, list[str]]:
        done = 0
        failures: list[str] = []
        while begin < end and len(found.failures) + len(failures) < _FAILURES_MAX:
            result = run_seeds(programs[width], (begin, end))
            done += result.schedules
            if result.ok:
                break
            failures.append(result.failure)
            begin = result.failing_seed + 1
        return width, done, failures

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        # The slowest first.
        pending = [
            pool.submit(run, width, begin, min(begin + step, last))
            for width, (begins, last) in reversed(found.seeds.items())
            for step in [max(1, -(-(last - begins) // (jobs * _PIECES)))]
            for begin in range(begins, last, step)
        ]
        told = start
        for ended, job in enumerate(as_completed(pending), 1):
            width, done, failures = job.result()
            found.schedules[width] += done
            found.failures += failures
            found.seconds = time.monotonic() - start
            if progress is None:
                continue
            for report in failures:
                progress(report)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                progress(f"{100 * ended // len(pending)} %: {found}")
    return found
