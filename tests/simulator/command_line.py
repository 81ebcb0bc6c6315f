"""`python tests/simulator`: explore interleavings and faults of the device code from seeds.

It compiles the sources of the checkout that it lies in, and needs g++ and an importable flashwarp.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from flashwarp.errors import ArgumentError, FlashwarpError
from simulator.coverage import print_uncovered
from simulator.exploration import explore, seed_of_today
from simulator.mutants import MUTANTS
from simulator.simulate import scenarios, simulate


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python tests/simulator", description=__doc__)
    add = made.add_argument
    add("--scenario", default="", help="one scenario; default all, in turn")
    add("--width", type=int, default=1, help="lanes of a warp: 1, 4 or 32; default 1")
    add("--mode", default="any", help="memory: sc, weak, or any (default): the seed chooses")
    add(
        "--strategy",
        default="any",
        help="random, priority, round-robin, rival, exhaustive, or any (default): the seed chooses",
    )
    add("--seeds", default="", help="FIRST:LAST, without the last; default 0:1000000")
    add("--time", type=float, default=10.0, help="budget in seconds; default 10")
    add("--faults", default="", help="as errors=5,delay=20; default: the seed chooses")
    add("--preemptions", type=int, default=2, help="bound of the exhaustive strategy; default 2")
    add(
        "--policy",
        default="clock",
        help="replacement: a policy's name, a C++ header that defines one as FILE:TYPE, "
        "or hostile, which breaks every rule",
    )
    add("--mutant", default="", help="compile a deliberate mistake in")
    add("--source", type=Path, help="a C++ file with your own scenarios")
    add(
        "--schedules",
        type=int,
        default=0,
        help="explore everything: this many schedules over all scenarios and widths, on all cores; "
        "--seeds FIRST chooses where to begin, today's date by default",
    )
    add("--jobs", type=int, default=0, help="processes for --schedules; default one a core")
    add("--trace", action="store_true", help="print every event")
    add("--list", action="store_true", help="list scenarios and mutants")
    add(
        "--coverage",
        type=float,
        metavar="SECONDS",
        help="list the lines of the device headers that no schedule of this time runs",
    )
    return made


def _seeds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        return int(first), int(last) if colon else int(first) + 1
    except ValueError:
        raise ArgumentError(f"--seeds {text}: give FIRST:LAST, as in 0:1000") from None


def _explore(schedules: int, jobs: int, seeds: str) -> int:
    first = _seeds(seeds)[0] if seeds else seed_of_today()
    print(f"{schedules} schedules over all scenarios and widths, from seed {first} on", flush=True)
    found = explore(
        schedules,
        jobs=jobs or None,
        first_seed=first,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(found)
    return 1 if found.failures else 0


def _simulate(options: argparse.Namespace) -> int:
    result = simulate(
        options.source,
        scenario=options.scenario,
        width=options.width,
        mode=options.mode,
        strategy=options.strategy,
        seeds=_seeds(options.seeds or "0:1000000"),
        seconds=options.time,
        faults=options.faults,
        preemptions=options.preemptions,
        policy=options.policy,
        mutant=options.mutant,
        trace=options.trace,
    )
    if result.failure:
        print(result.failure)
    print(
        f"width {options.width}: {result.schedules} schedules, {result.points} points in "
        f"{result.seconds:.1f} s ({result.points_per_second / 1e6:.2f} M/s)"
        + (", none left" if result.exhausted else "")
    )
    return 0 if result.ok else 1


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; return its exit code."""
    # The signal ends it by way of its `finally` clauses, which delete temporary folders.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options = parser().parse_args(arguments)
    try:
        if options.list:
            print(scenarios(options.source), end="")
            for name, chosen in MUTANTS.items():
                print(f"  mutant {name}: {chosen.why}")
            return 0
        if options.coverage is not None:
            print_uncovered(options.coverage)
            return 0
        if options.schedules:
            return _explore(options.schedules, options.jobs, options.seeds)
        return _simulate(options)
    except FlashwarpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
