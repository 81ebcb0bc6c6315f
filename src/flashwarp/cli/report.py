"""`flashwarp report`: a run or a trace as one page of HTML, with plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwarp.cli.parser import Parser, amount, output_path

if TYPE_CHECKING:
    from flashwarp.probe.page import Page
    from flashwarp.trace.compare import Comparison

_ROWS_MAX = 40
_HEADING_MAX = 120
_MADE_BY = (
    "a trace of `flashwarp trace record`, or the JSON of `flashwarp bench`, `trace compare`, "
    "or `tune`, or of a benchmark"
)


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` its options."""
    parser.set_defaults(run=_run)
    parser.add_argument("source", type=Path, help=f"{_MADE_BY[0].upper()}{_MADE_BY[1:]}.")
    parser.add_argument(
        "-o", "--output", type=output_path, default=Path("report.html"), help="The page."
    )
    parser.add_argument(
        "--accesses",
        type=amount(int, 1),
        default=200_000,
        help="Of a longer trace, as many from its start are replayed.",
    )


def _run(options: argparse.Namespace) -> None:
    from flashwarp.storage import containers, files
    from flashwarp.trace.format import is_trace

    source: Path = options.source
    with files.open_for_reading(files.check_name(source)) as file:
        head = file.read(containers.HEAD_BYTES)
    if is_trace(head):
        page = _of_trace(source, options.accesses)
    else:
        page = _of_json(source, containers.read_json(source, _MADE_BY))
    with files.replacing(options.output) as file:
        file.write(page.html().encode())
    print(f"{options.output}: {page.title}")


def _of_trace(source: Path, accesses: int) -> Page:
    from flashwarp.probe import plots
    from flashwarp.probe.page import Page
    from flashwarp.probe.report import provenance
    from flashwarp.trace import Trace, compare

    trace = Trace.load(source)
    used = Trace(trace.lines[:accesses], trace.line_bytes, trace.name)
    done = compare(used)  # raises for an empty one
    left_out = f"; the first {len(used):,} are shown" if len(used) < len(trace) else ""
    page = Page(
        f"Trace {source.name}",
        f"{len(trace):,} accesses to {trace.footprint:,} lines of {trace.line_bytes:,} bytes"
        f"{left_out}.",
        provenance("cpu"),
    )
    _add_comparison(page, done.as_dict())
    page.add_plot(
        "Lines used over time: line number by access",
        plots.inline_svg(3.2, partial(plots.accesses, used.lines)),
        "Brighter: more accesses. A rising edge is a scan; bands are lines that come again.",
    )
    page.add_plot(
        "Popularity: share of accesses by share of lines, %",
        plots.inline_svg(3.0, partial(plots.popularity, used.lines)),
        "The share of the accesses that the most popular lines have; dashed: all alike.",
    )
    return page


def _of_json(source: Path, found: Any) -> Page:
    from flashwarp.errors import FileFormatError, FlashwarpError
    from flashwarp.probe.page import Page

    add: dict[str, Callable[[Page, Any], None]] = {
        "rows": _add_rows,
        "comparisons": _add_comparisons,
    }
    content = found if isinstance(found, dict) else {}
    names = [name for name in add if content.get(name)]
    if not names:
        raise FileFormatError(f"{source} is JSON text without anything to show, not {_MADE_BY}")
    facts = {name: fact for name, fact in content.items() if name not in (*add, "title")}
    page = Page(str(content.get("title", source.name)), f"From {source.name}.", facts)
    try:
        for name in names:
            add[name](page, content[name])
    except FlashwarpError:
        raise
    # What draws them meets any values, and names none of the file.
    except Exception as error:
        raise FileFormatError(
            f"{source} has {' and '.join(names)}, but not as this version of flashwarp writes "
            "them: run again what made it"
        ) from error
    return page


def _add_comparisons(page: Page, comparisons: list[dict[str, Any]]) -> None:
    for each in comparisons:
        _add_comparison(page, each)


def _add_comparison(page: Page, done: dict[str, Any]) -> None:
    from flashwarp.probe import plots
    from flashwarp.trace.compare import Comparison, draw

    comparison = Comparison(**done)
    page.lead += f" {_bound_of(comparison)}"
    page.add_plot(
        f"Hit rate by size of the cache, %: {comparison.trace}"[:_HEADING_MAX],
        plots.inline_svg(3.6, partial(draw, comparison)),
        f"Sets of {comparison.ways} lines. MIN is the optimum of one who knows the future; in "
        "sets, with the sets of this cache.",
    )
    rates = comparison.hit_rates
    names = ["cache, lines", *(f"{each:,}" for each in comparison.capacities)]
    rows = [[name, *map(_percent, each)] for name, each in rates.items()]
    page.add_table("Hit rate by lines in the cache", names, rows)


def _bound_of(done: Comparison) -> str:
    """Say what a cache of a tenth of the lines can reach, which tells what bounds the run."""
    from flashwarp.trace.compare import MIN, MIN_IN_SETS

    wanted = done.footprint / 10
    at = min(range(len(done.capacities)), key=lambda i: abs(done.capacities[i] - wanted))
    rates = {name: each[at] for name, each in done.hit_rates.items()}
    most = rates.pop(MIN)
    rates.pop(MIN_IN_SETS)
    best = max(rates, key=lambda name: rates[name])
    return (
        f"Of {done.trace}, a cache of {done.capacities[at]:,} lines hits {_percent(rates[best])} "
        f"with {best}, the best policy here, and {_percent(most)} with the best possible one."
    )


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _add_rows(page: Page, rows: list[dict[str, Any]]) -> None:
    from flashwarp.probe import plots

    compared = sorted((row for row in rows if row.get("reference")), key=lambda row: row["ratio"])
    if compared:
        names = [f"{row['name']}, to {row['reference_name']}" for row in compared]
        ratios = [row["ratio"] for row in compared]
        page.lead += f" The lowest ratio is {ratios[0]:.2f}: {names[0]}."
        svg = plots.bars(names[:_ROWS_MAX], ratios[:_ROWS_MAX], "ratio")
        what = "Ratio of each to what it is compared with, lowest first"
        page.add_plot(what, svg, "1: equal. Both are of the same run.")
    for unit in dict.fromkeys(row["unit"] for row in rows):
        these = [row for row in rows if row["unit"] == unit][:_ROWS_MAX]
        values = [row["value"] for row in these]
        beside = [row.get("reference", 0.0) for row in these]
        svg = plots.bars([row["name"] for row in these], values, unit, beside)
        page.add_plot(f"Measured, in {unit}" if unit else "Measured", svg, "")
    names = ["measurement", "value", "unit", "compared with", "its value", "ratio", "data", "note"]
    page.add_table("All measurements", names, [_cells_of(row) for row in rows])


def _cells_of(row: dict[str, Any]) -> tuple[Any, ...]:
    against: tuple[Any, ...] = ("", "", "")
    if row.get("reference"):
        against = (row.get("reference_name", ""), float(row["reference"]), float(row["ratio"]))
    checked = {None: "", True: "right", False: "WRONG"}[row.get("checked")]
    return (row["name"], float(row["value"]), row["unit"], *against, checked, row.get("note", ""))
