"""What the demo shows when it is done: plain text, and a picture.

Numbers come from the results as they are; nothing is rounded before it is compared, and units are
decimal (GB = 10**9 bytes) except for sizes that are powers of two (KiB, MiB, GiB).
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.features import MEMMAP, OURS, FeaturesResult, Rate
from demo.graph import GraphResult
from demo.table import TableResult
from flashwarp.errors import MissingFileError
from flashwarp.probe.text import aligned, binary, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DemoResult", "as_dict", "draw", "text"]

# One colour for flashwarp, one for all others, one for ceilings.
_OURS, _THEIRS, _LIMIT = "#0f766e", "#9aa1ac", "#b45309"


@dataclass(frozen=True)
class DemoResult:
    """The three parts, and where they ran."""

    device: str
    directory: str
    size: str
    compile_seconds: float  # for all kernels, once: no other figure contains it
    seconds: float
    features: FeaturesResult
    graph: GraphResult
    table: TableResult


def as_dict(result: DemoResult) -> dict[str, Any]:
    """Return everything, for JSON: fields and the figures that follow from them."""

    def rates(found: tuple[Rate, ...]) -> list[dict[str, Any]]:
        return [{**asdict(rate), "rows_per_s": rate.rows_per_s} for rate in found]

    return {
        **asdict(result),
        "features": {
            **asdict(result.features),
            "disk": rates(result.features.disk),
            "page_cache": rates(result.features.page_cache),
            "of_ceiling": result.features.of_ceiling,
        },
        "graph": {
            **asdict(result.graph),
            "searches": [
                {
                    **asdict(s),
                    "teps": s.teps,
                    "bytes_read": s.bytes_read,
                    "bytes_needed": s.bytes_needed,
                }
                for s in result.graph.searches
            ],
        },
        "table": {
            **asdict(result.table),
            "selectivity": result.table.selectivity,
            "queries": [
                {**asdict(q), "of_whole_columns": q.of_whole_columns} for q in result.table.queries
            ],
        },
    }


# The text.


def text(result: DemoResult) -> str:
    """Return what the demo found: the guarantee first, then a paragraph for each part."""
    parts = (
        "Every answer was right: each row equals numpy's, each distance scipy's, each sum numpy's.",
        _features_text(result.features),
        _graph_text(result.graph),
        _table_text(result.table),
        f"All figures are from this run, on {result.device}. It took {result.seconds:.0f} s.\n"
        f"Kernels were compiled or loaded in {result.compile_seconds:.1f} s, once; no figure "
        "contains that.",
    )
    return "\n\n".join(parts)


def _features_text(r: FeaturesResult) -> str:
    where = "GPU" if r.on_gpu else "host"
    lines = [
        f"ROWS of {binary(r.row_bytes)} from a file of {binary(r.file_bytes)} to {where} memory; "
        f"cache {binary(r.cache_bytes)}",
        "  From the disk, random rows that nobody asked for before:",
    ]
    most = {rate.how: rate for rate in r.disk}.values()  # the last of each way
    ceiling = r.ceiling.random_reads_per_s
    rows = [(f"{rate.how}, {rate.call_rows:,} a call", *_rate_cells(rate, r)) for rate in most]
    if ceiling:
        rows.append(
            ("the disk's ceiling", f"{thousands(ceiling)} reads/s", _gb(ceiling * r.row_bytes))
        )
    lines.append(_indent(aligned(rows), 4))
    if ceiling:
        lines.append(f"    That is {r.of_ceiling:.0%} of the ceiling ({r.ceiling.note}).")
    else:
        lines.append(f"    The ceiling was {r.ceiling.note}.")
    lines.append(_indent(f"{r.cold_note}\n{_wrapped(f'Route {r.path}.')}", 4))
    if r.page_cache:
        count = r.page_cache[0].call_rows
        lines.append(f"  From the page cache, {count:,} rows a call, popular ones more often:")
        rows = [(rate.how, *_rate_cells(rate, r)) for rate in r.page_cache]
        rows.append(("the link's ceiling, copy engine", "", f"{r.link_gb_per_s:.2f} GB/s"))
        lines.append(_indent(aligned(rows), 4))
        hits = r.page_cache[0].hit_rate or 0
        lines.append(f"    {hits:.0%} of flashwarp's rows were in its cache in GPU memory.")
        lines.append(_indent(_wrapped(f"Route {r.page_cache_path}."), 4))
        lines += [_indent(_wrapped(f"Not measured: {each}."), 4) for each in r.missing]
    return "\n".join(lines)


def _rate_cells(rate: Rate, r: FeaturesResult) -> tuple[str, str]:
    return f"{thousands(rate.rows_per_s)} rows/s", _gb(rate.rows_per_s * r.row_bytes)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _graph_text(r: GraphResult) -> str:
    head = (
        f"SEARCH, breadth first: {thousands(r.vertices)} vertices, {thousands(r.entries)} "
        f"neighbours in {binary(r.file_bytes)} on the disk; cache {binary(r.cache_bytes)}"
    )
    rows = [("source", "reached", "time", "read", "of the file", "", "edges/s")]
    for s in r.searches:
        rows.append(
            (
                str(s.source),
                f"{s.reached:,}",
                f"{s.seconds:.2f} s",
                binary(s.bytes_read),
                f"{s.bytes_read / r.file_bytes:.2f}",
                _gb(s.bytes_read / s.seconds),
                thousands(s.teps),
            )
        )
    tail = (
        f"scipy takes {r.reference_seconds:.2f} s for a search of the same graph in host memory, "
        "loaded before."
    )
    return f"{head}\n{_indent(aligned(rows), 2)}\n  {tail}"


def _table_text(r: TableResult) -> str:
    head = (
        f"QUERY of {r.rows:,} flights, for the {r.selected:,} of at least {r.miles_min:,.0f} miles "
        f"({r.selectivity:.2%}); cache {binary(r.cache_bytes)}"
    )
    rows = [("", "reads", "of its columns", "mean of the column", "missing")]
    for q in r.queries:
        rows.append(
            (
                f"{q.name} {q.adds}",
                binary(q.bytes_read),
                f"{q.of_whole_columns:.2f}",
                f"{q.mean:,.1f}",
                str(q.missing),
            )
        )
    tail = (
        f"One column is scanned. Of the others, only lines of {binary(r.line_bytes)} with a "
        "selected flight are read."
    )
    return f"{head}\n{_indent(aligned(rows), 2)}\n  {tail}"


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, 94, subsequent_indent="  ")


def _indent(lines: str, by: int) -> str:
    return "\n".join(" " * by + line for line in lines.splitlines())


# The picture.


def draw(result: DemoResult, path: Path) -> None:
    """Draw how fast rows arrive, with the ceilings, into a PNG.

    Raises
    ------
    MissingFileError
        When matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingFileError(
            "the picture needs matplotlib: pip install 'flashwarp[demo]'"
        ) from error
    r = result.features
    panels = 2 if r.page_cache else 1
    with rc_context({"font.size": 15, "axes.linewidth": 1.2}):
        figure = Figure(figsize=(2.5 + 8 * panels, 6.8), dpi=130, layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, width_ratios=[1.15, 1][:panels])[0]
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        _draw_disk(axes[0], r)
        if r.page_cache:
            _draw_page_cache(axes[1], r)
        figure.suptitle(_message(r), x=0.01, ha="left", fontsize=21, fontweight="bold")
        note = "" if r.on_gpu else "\nThe CPU device is for development and tests."
        figure.supxlabel(
            f"flashwarp demo on {result.device}. File of {binary(r.file_bytes)}, cache of "
            f"{binary(r.cache_bytes)}, every row checked.{note}",
            x=0.01,
            ha="left",
            fontsize=12,
            color="0.4",
        )
        figure.savefig(path)


def _message(r: FeaturesResult) -> str:
    what = (
        f"{'GPU' if r.on_gpu else 'CPU'} kernels read random {binary(r.row_bytes)} rows of a file"
    )
    if not r.of_ceiling:
        return what
    return f"{what}\nat {r.of_ceiling:.0%} of the rate that the disk itself reaches"


def _draw_disk(axes: Axes, r: FeaturesResult) -> None:
    for how, colour in ((MEMMAP, _THEIRS), (OURS, _OURS)):
        rates = [rate for rate in r.disk if rate.how == how]
        if not rates:
            continue
        xs, ys = [rate.call_rows for rate in rates], [rate.rows_per_s / 1e3 for rate in rates]
        axes.plot(xs, ys, marker="o", markersize=8, linewidth=3, color=colour, clip_on=False)
        axes.annotate(
            how.replace(", ", ",\n"),
            (xs[-1], ys[-1]),
            xytext=(14, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )
    ceiling = r.ceiling.random_reads_per_s / 1e3
    if ceiling:
        axes.axhline(ceiling, color=_LIMIT, linewidth=2, linestyle="--")
        axes.annotate(
            f"ceiling of the disk: {ceiling:.0f} thousand reads a second",
            (r.disk[0].call_rows, ceiling),
            xytext=(0, 6),
            textcoords="offset points",
            color=_LIMIT,
        )
    axes.set_xscale("log", base=2)
    calls = sorted({rate.call_rows for rate in r.disk})
    axes.set_xticks(calls, [f"{count:,}" for count in calls])
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * max(ceiling, *(rate.rows_per_s / 1e3 for rate in r.disk)))
    axes.set_xlabel("rows asked for in one call")
    axes.set_ylabel("thousand rows a second")
    if r.page_cache:
        axes.set_title("The file is on the disk, no hits", loc="left", pad=34)


def _draw_page_cache(axes: Axes, r: FeaturesResult) -> None:
    rates = sorted(r.page_cache, key=lambda rate: -rate.rows_per_s)
    speeds = [rate.rows_per_s * r.row_bytes / 1e9 for rate in rates]
    colours = [_OURS if rate.how == OURS else _THEIRS for rate in rates]
    bars = axes.barh(range(len(rates)), speeds, height=0.62, color=colours)
    for label in axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=5):
        # The line of the ceiling must not strike a figure out.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    names = [rate.how.replace(", ", ",\n") for rate in rates]
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.axvline(r.link_gb_per_s, color=_LIMIT, linewidth=2, linestyle="--", zorder=0)
    axes.annotate(
        f"ceiling of the link: {r.link_gb_per_s:.0f} GB/s",
        (r.link_gb_per_s, 1),
        xycoords=("data", "axes fraction"),
        xytext=(6, 4),
        textcoords="offset points",
        ha="right",
        color=_LIMIT,
    )
    axes.set_xlim(0, 1.15 * max(r.link_gb_per_s, *speeds))
    axes.set_xlabel("GB a second")
    hits = r.page_cache[0].hit_rate or 0
    axes.set_title(f"The file is in the page cache, {hits:.0%} hits", loc="left", pad=34)
