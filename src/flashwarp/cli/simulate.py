"""`flashwarp simulate`: explore interleavings and faults of the device code from seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashwarp.errors import ArgumentError

__all__ = ["simulate"]


def _seeds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        return int(first), int(last) if colon else int(first) + 1
    except ValueError:
        raise ArgumentError(f"--seeds {text}: give FIRST:LAST, as in 0:1000") from None


def _explore(schedules: int, jobs: int, seeds: str) -> None:
    from flashwarp.testing.exploration import explore, seed_of_today

    first = _seeds(seeds)[0] if seeds else seed_of_today()
    typer.echo(f"{schedules} schedules over all scenarios and widths, from seed {first} on")
    found = explore(
        schedules,
        jobs=jobs or None,
        first_seed=first,
        progress=lambda line: typer.echo(line, err=True),
    )
    typer.echo(str(found))
    if found.failures:
        raise typer.Exit(1)


def simulate(
    scenario: Annotated[str, typer.Option(help="One scenario; default all, in turn.")] = "",
    width: Annotated[int, typer.Option(help="Lanes of a warp: 1, 4 or 32.")] = 1,
    mode: Annotated[str, typer.Option(help="Memory: sc, weak, or any: the seed chooses.")] = "any",
    strategy: Annotated[
        str,
        typer.Option(
            help="random, priority, round-robin, rival, exhaustive, or any: the seed chooses."
        ),
    ] = "any",
    seeds: Annotated[
        str, typer.Option(help="FIRST:LAST, without the last; default 0:1000000.")
    ] = "",
    time: Annotated[float, typer.Option(help="Budget in seconds.")] = 10.0,
    faults: Annotated[str, typer.Option(help="As errors=5,delay=20; default by the seed.")] = "",
    preemptions: Annotated[int, typer.Option(help="Bound of the exhaustive strategy.")] = 2,
    policy: Annotated[
        str, typer.Option(help="Replacement: a policy's name, or hostile, which breaks every rule.")
    ] = "clock",
    mutant: Annotated[str, typer.Option(help="Compile a deliberate mistake in.")] = "",
    source: Annotated[
        Path | None, typer.Option(help="A C++ file with scenarios of your own.")
    ] = None,
    schedules: Annotated[
        int,
        typer.Option(
            help="Explore everything: so many schedules over all scenarios and widths, on all "
            "cores. --seeds FIRST: where to begin; default today's."
        ),
    ] = 0,
    jobs: Annotated[int, typer.Option(help="Processes for --schedules; default one a core.")] = 0,
    trace: Annotated[bool, typer.Option(help="Print every event.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List scenarios and mutants.")] = False,
) -> None:
    """Run device code and controllers under a seeded scheduler, and check what they promise."""
    from flashwarp.testing.mutants import MUTANTS
    from flashwarp.testing.simulate import scenarios
    from flashwarp.testing.simulate import simulate as run

    if list_all:
        typer.echo(scenarios(source), nl=False)
        for name, chosen in MUTANTS.items():
            typer.echo(f"  mutant {name}: {chosen.why}")
        return
    if schedules:
        _explore(schedules, jobs, seeds)
        return
    result = run(
        source,
        scenario=scenario,
        width=width,
        mode=mode,
        strategy=strategy,
        seeds=_seeds(seeds or "0:1000000"),
        seconds=time,
        faults=faults,
        preemptions=preemptions,
        policy=policy,
        mutant=mutant,
        trace=trace,
    )
    if result.failure:
        typer.echo(result.failure)
    typer.echo(
        f"width {width}: {result.schedules} schedules, {result.points} points in "
        f"{result.seconds:.1f} s ({result.points_per_second / 1e6:.2f} M/s)"
        + (", none left" if result.exhausted else "")
    )
    if not result.ok:
        raise typer.Exit(1)
