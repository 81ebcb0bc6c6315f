"""`flashwarp trace`: record what lines are used, replay it under a policy, compare policies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashwarp.trace import Trace

__all__ = ["trace"]

trace = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Record which lines are used, and see which of them each replacement policy keeps.",
)

_SOURCE = "A file of `record`, or what can be made: zipf, scan+zipf, loop, bfs."
_ACCESSES = "Length of a trace that is made."


@trace.command()
def record(
    indices: Annotated[Path, typer.Argument(help="Row indices: a .npy file of integers.")],
    output: Annotated[Path, typer.Argument(help="Where the trace goes, a .npz file.")],
    rows_of: Annotated[
        Path | None, typer.Option(help="The .npy file whose rows they are; tells their size.")
    ] = None,
    row_bytes: Annotated[str, typer.Option(help="Size of a row, where there is no file.")] = "",
    line: Annotated[str, typer.Option(help="Size of a line of the cache.")] = "4 KiB",
) -> None:
    """Make a trace from the indices of a gather. Programs record with `flashwarp.trace.record`."""
    import math

    import numpy as np

    from flashwarp.config import parse_bytes
    from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
    from flashwarp.storage import npy
    from flashwarp.trace import trace_of_indices

    if (rows_of is None) == (not row_bytes):
        raise ArgumentError("say the size of a row, with either --rows-of or --row-bytes")
    if rows_of is None:
        size, length = parse_bytes(row_bytes), None
    else:
        layout = npy.read_layout(str(rows_of))
        size, length = math.prod(layout.shape[1:]) * layout.dtype.itemsize, layout.shape[0]
    try:
        chosen = np.load(indices, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise MissingFileError(f"{indices} does not exist") from error
    except (ValueError, OSError, EOFError) as error:
        raise FileFormatError(f"{indices} is no .npy file: {error}") from error
    if length is not None and chosen.size and chosen.max() >= length:
        raise ArgumentError(f"index {chosen.max()} is beyond the {length} rows of {rows_of}")
    made = trace_of_indices(chosen, size, line_bytes=parse_bytes(line), name=indices.stem)
    made.save(output)
    typer.echo(f"{len(made):,} accesses to {made.footprint:,} lines in {output}")


@trace.command()
def replay(
    source: Annotated[str, typer.Argument(help=_SOURCE)],
    policy: Annotated[str, typer.Option(help="clock, lru, fifo, sieve, s3_fifo, random.")] = (
        "clock"
    ),
    lines: Annotated[
        int, typer.Option(help="Lines of the cache; default a tenth of those used.")
    ] = 0,
    ways: Annotated[int, typer.Option(help="Frames of a set: 4, 8 or 16.")] = 8,
    accesses: Annotated[int, typer.Option(help=_ACCESSES)] = 200_000,
) -> None:
    """Run a trace through the page cache on the CPU device, and count its hits."""
    from flashwarp.trace import replay as run

    chosen = _load(source, accesses)
    capacity = lines or max(ways, chosen.footprint // 10)
    done = run(chosen, policy, capacity_lines=capacity, ways=ways)
    typer.echo(
        f"{done.policy}, {done.capacity_lines:,} lines in sets of {ways}: "
        f"{done.hits:,} of {len(chosen):,} accesses hit ({done.hit_rate:.2%}), "
        f"{done.evictions:,} evictions"
    )


@trace.command()
def compare(
    sources: Annotated[list[str], typer.Argument(help=f"Any number of traces. {_SOURCE}")],
    sizes: Annotated[
        str, typer.Option(help="Lines of the cache, as 100,1000; default shares of those used.")
    ] = "",
    policies: Annotated[str, typer.Option(help="As lru,sieve; default all.")] = "",
    ways: Annotated[int, typer.Option(help="Frames of a set: 4, 8 or 16.")] = 8,
    accesses: Annotated[int, typer.Option(help=_ACCESSES)] = 200_000,
    json: Annotated[Path | None, typer.Option(help="Also write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them: .png, .svg or .pdf.")] = None,
) -> None:
    """Show hit rates of all policies and of Belady's optimum, over sizes of the cache."""
    from rich.console import Console

    from flashwarp.policy import POLICIES
    from flashwarp.probe.report import provenance
    from flashwarp.trace import compare as run
    from flashwarp.trace.compare import plot as draw
    from flashwarp.trace.compare import save

    done = [
        run(
            _load(source, accesses),
            capacities=tuple(_numbers("--sizes", sizes)),
            policies=tuple(filter(None, policies.split(","))) or tuple(POLICIES),
            ways=ways,
        )
        for source in sources
    ]
    for each in done:
        Console().print(each.table())
    if json is not None:
        save(done, json, **provenance("cpu"))
    if plot is not None:
        draw(done, plot)


def _load(source: str, accesses: int) -> Trace:
    from flashwarp.trace import SYNTHETIC, Trace, make

    return make(source, accesses) if source in SYNTHETIC else Trace.load(source)


def _numbers(option: str, text: str) -> Iterator[int]:
    from flashwarp.errors import ArgumentError

    for part in filter(None, text.split(",")):
        try:
            yield int(part)
        except ValueError:
            raise ArgumentError(f"{option} {text}: {part!r} is no number of lines") from None
