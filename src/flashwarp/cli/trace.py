"""`flashwarp trace`: record what lines are used, replay it under a policy, compare policies."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashwarp.cli.parser import STDOUT, Parser, add_json, output_path, text_beside, write_json

if TYPE_CHECKING:
    from flashwarp.trace import Trace

_SOURCE = "A file of `record`, or what can be made: zipf, scan+zipf, loop, bfs."


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` the subcommands and their options."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    what = "Make a trace from the indices of a gather."
    record = commands.add_parser(
        "record", help=what, description=f"{what} Programs record with `flashwarp.trace.record`."
    )
    record.set_defaults(run=_record)
    record.add_argument("indices", type=Path, help="Row indices: a .npy file of integers.")
    record.add_argument("output", type=Path, help="Where the trace goes, a .npz file.")
    record.add_argument(
        "--rows-of", type=Path, help="The .npy file whose rows they are; it says how large one is."
    )
    record.add_argument("--row-bytes", default="", help="Size of a row, if there is no file.")
    record.add_argument("--line", default="4 KiB", help="Size of a line of the cache.")

    what = "Run a trace through the cache on the CPU device, and count its hits."
    replay = commands.add_parser("replay", help=what, description=what)
    replay.set_defaults(run=_replay)
    replay.add_argument("source", help=_SOURCE)
    replay.add_argument(
        "--policy", default="clock", help="clock, lru, fifo, sieve, s3_fifo or random."
    )
    replay.add_argument(
        "--lines", type=int, help="Lines of the cache; default a tenth of those used."
    )

    what = "Show hit rates of all policies and of Belady's optimum, over sizes of the cache."
    compare = commands.add_parser("compare", help=what, description=what)
    compare.set_defaults(run=_compare)
    compare.add_argument("sources", nargs="+", metavar="source", help=_SOURCE)
    compare.add_argument(
        "--sizes", default="", help="Lines of the cache, as 100,1000; default shares of those used."
    )
    compare.add_argument("--policies", default="", help="As lru,sieve; default all.")
    add_json(compare)
    compare.add_argument("--plot", type=output_path, help="Draw them: .png, .svg or .pdf.")

    for each in (replay, compare):
        each.add_argument("--ways", type=int, default=8, help="Frames of a set: 4, 8 or 16.")
        each.add_argument(
            "--accesses", type=int, default=200_000, help="Length of a trace that is made."
        )


def _record(options: argparse.Namespace) -> None:
    import math

    import numpy as np

    from flashwarp.config import parse_bytes
    from flashwarp.errors import ArgumentError
    from flashwarp.storage import npy
    from flashwarp.trace import trace_of_indices

    rows_of, indices = options.rows_of, options.indices
    if (rows_of is None) == (not options.row_bytes):
        raise ArgumentError("give the size of a row: either --rows-of or --row-bytes")
    if rows_of is None:
        size, length = parse_bytes(options.row_bytes), None
    else:
        layout = npy.read_layout(str(rows_of))
        size, length = math.prod(layout.shape[1:]) * layout.dtype.itemsize, layout.shape[0]
    npy.read_layout(str(indices))  # raises for what is none
    chosen = np.load(indices, mmap_mode="r", allow_pickle=False)
    if length is not None and chosen.size and chosen.max() >= length:
        raise ArgumentError(f"index {chosen.max()} is beyond the {length} rows of {rows_of}")
    made = trace_of_indices(chosen, size, line_bytes=parse_bytes(options.line), name=indices.stem)
    made.save(options.output)
    print(f"{len(made):,} accesses to {made.footprint:,} lines in {options.output}")


def _replay(options: argparse.Namespace) -> None:
    from flashwarp.trace import replay as run

    chosen = _load(options.source, options.accesses)
    capacity = options.lines
    if capacity is None:
        capacity = max(options.ways, chosen.footprint // 10)
    done = run(chosen, options.policy, capacity_lines=capacity, ways=options.ways)
    print(
        f"{done.policy}, {done.capacity_lines:,} lines in sets of {options.ways}: "
        f"{done.hits:,} of {len(chosen):,} accesses hit ({done.hit_rate:.2%}), "
        f"{done.evictions:,} evictions"
    )


def _compare(options: argparse.Namespace) -> None:
    from flashwarp.policy import POLICIES
    from flashwarp.probe.report import provenance
    from flashwarp.trace import compare as run
    from flashwarp.trace.compare import plot, save

    done = [
        run(
            _load(source, options.accesses),
            capacities=tuple(_numbers("--sizes", options.sizes)),
            policies=tuple(filter(None, options.policies.split(","))) or tuple(POLICIES),
            ways=options.ways,
        )
        for source in options.sources
    ]
    with text_beside(options.json):
        for each in done:
            print(each.table())
    if options.json == STDOUT:
        comparisons = [each.as_dict() for each in done]
        write_json(STDOUT, {**provenance("cpu"), "comparisons": comparisons})
    elif options.json is not None:
        save(done, options.json, **provenance("cpu"))
    if options.plot is not None:
        plot(done, options.plot)


def _load(source: str, accesses: int) -> Trace:
    from flashwarp.trace import SYNTHETIC, Trace, make

    return make(source, accesses) if source in SYNTHETIC else Trace.load(source)


def _numbers(option: str, text: str) -> Iterator[int]:
    from flashwarp.errors import ArgumentError

    for part in filter(None, text.split(",")):
        try:
            yield int(part)
        except ValueError:
            raise ArgumentError(f"{option} {text}: {part!r} is not a number of lines") from None
