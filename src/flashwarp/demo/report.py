"""What the demo shows when it is done: a table for each part, and a picture.

Numbers come from the results as they are; nothing is rounded before it is compared, and units are
decimal (GB = 10**9 bytes) except for sizes that are powers of two (KiB, MiB, GiB).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashwarp.demo.features import FeaturesResult
from flashwarp.demo.graph import GraphResult
from flashwarp.demo.table import TableResult
from flashwarp.errors import MissingFileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DemoResult", "as_dict", "draw", "show"]

# One colour is flashwarp throughout; others are what it is compared with.
_OURS, _OURS_LIGHT, _THEIRS, _THEIRS_LIGHT, _LIMIT = (
    "#0f766e",
    "#5eb5ab",
    "#6b7280",
    "#b6bcc6",
    "#b45309",
)


@dataclass(frozen=True)
class DemoResult:
    """The three parts, and where they ran."""

    device: str
    directory: str
    size: str
    seconds: float
    features: FeaturesResult
    graph: GraphResult
    table: TableResult


def binary(nbytes: float) -> str:
    """Write a size that is a power of two, or near one: "128 MiB"."""
    value, unit = _scale(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def thousands(value: float) -> str:
    """Write a count with its magnitude: "12.3 k", "4.56 M"."""
    value, unit = _scale(value, 1000, ("", "k", "M", "G", "T"))
    return f"{value:.3g} {unit}".rstrip()


def _scale(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return value, units[power]


def as_dict(result: DemoResult) -> dict[str, Any]:
    """Return everything, for JSON: fields and the figures that follow from them."""
    return {
        **asdict(result),
        "features": {
            **asdict(result.features),
            "passes": [
                {
                    **asdict(p),
                    "rows_per_s": p.rows_per_s,
                    "gb_per_s": p.gb_per_s,
                    "hit_rate": p.hit_rate,
                }
                for p in result.features.passes
            ],
            "cold_ratio": result.features.cold_ratio,
        },
        "graph": {
            **asdict(result.graph),
            "searches": [
                {
                    **asdict(s),
                    "teps": s.teps,
                    "bytes_read": s.bytes_read,
                    "hit_rate": s.hit_rate,
                    "bytes_needed": s.bytes_needed,
                }
                for s in result.graph.searches
            ],
        },
        "table": {
            **asdict(result.table),
            "selectivity": result.table.selectivity,
            "queries": [
                {
                    **asdict(q),
                    "amplification": q.amplification,
                    "amplification_whole_columns": q.amplification_whole_columns,
                }
                for q in result.table.queries
            ],
        },
    }


# The tables on the terminal.


def show(result: DemoResult, console: Console) -> None:
    """Print one table a part, and the sentences that belong to them."""
    console.print()
    _show_features(result.features, console)
    _show_graph(result.graph, console)
    _show_table(result.table, console)
    console.print(f"On {escape(result.device)}, in {result.seconds:.0f} s.")


def _show_features(r: FeaturesResult, console: Console) -> None:
    console.print(
        "[bold]"
        f"Features: {thousands(r.passes[0].rows)} rows of {binary(r.row_bytes)} from a file "
        f"of {binary(r.file_bytes)}, cache {binary(r.cache_bytes)}"
        "[/]",
        highlight=False,
    )
    table = Table()
    for name in ("contender", "start"):
        table.add_column(name)
    for name in ("rows/s", "GB/s", "hit rate", "of memmap"):
        table.add_column(name, justify="right")
    for p in r.passes:
        table.add_row(
            p.contender,
            p.state,
            thousands(p.rows_per_s),
            f"{p.gb_per_s:.3f}",
            "-" if p.hit_rate is None else f"{p.hit_rate:.1%}",
            f"{p.rows_per_s / r.memmap(p.state).rows_per_s:.2f}x",
        )
    console.print(table)
    console.print(f"  [dim]{r.cold_note}[/dim]")
    if r.ceiling.random_reads_per_s:
        console.print(
            f"  The disk itself: {thousands(r.ceiling.random_reads_per_s)} random reads/s of "
            f"{binary(r.ceiling.random_bytes)} = {r.ceiling.random_gb_per_s:.3f} GB/s; sequential "
            f"{r.ceiling.sequential_gb_per_s:.2f} GB/s [dim]({r.ceiling.note})[/dim]. "
            f"flashwarp's cold misses: {r.cold_miss_gb_per_s:.3f} GB/s, "
            f"{r.cold_miss_gb_per_s / r.ceiling.random_gb_per_s:.0%} of it."
        )
    else:
        console.print(f"  The disk itself: {r.ceiling.note}")
    console.print(f"  Every value of every batch equals numpy's.\n  [dim]{escape(r.path)}[/dim]\n")


def _show_graph(r: GraphResult, console: Console) -> None:
    console.print(
        "[bold]"
        f"Breadth-first search: Kronecker graph of scale {r.scale}, "
        f"{thousands(r.vertices)} vertices, {thousands(r.entries)} neighbour entries in "
        f"{binary(r.file_bytes)}, cache {binary(r.cache_bytes)}"
        "[/]",
        highlight=False,
    )
    table = Table()
    for name in ("source", "reached", "levels", "TEPS", "time", "read", "of file", "hit rate"):
        table.add_column(name, justify="right")
    for s in r.searches:
        table.add_row(
            str(s.source),
            f"{s.reached:,}",
            str(len(s.levels)),
            thousands(s.teps),
            f"{s.seconds:.2f} s",
            binary(s.bytes_read),
            f"{s.bytes_read / r.file_bytes:.2f}x",
            f"{s.hit_rate:.2%}",
        )
    console.print(table)
    console.print(
        f"  In memory instead: reading the whole file {r.load_seconds:.2f} s, then "
        f"scipy.sparse.csgraph {r.reference_seconds:.2f} s a search. TEPS: undirected edges of the "
        "part reached, a second.\n  Every distance equals scipy's.\n"
        f"  [dim]{escape(r.path)}[/dim]\n"
    )


def _show_table(r: TableResult, console: Console) -> None:
    console.print(
        "[bold]"
        f"Query: {r.rows:,} flights, those of at least {r.miles_min:,.0f} miles: "
        f"{r.selected:,} ({r.selectivity:.2%})"
        "[/]",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    table.add_column("adds")
    for name in ("needed", "read", "amplification", "whole columns", "mean", "missing"):
        table.add_column(name, justify="right")
    for q in r.queries:
        table.add_row(
            q.name,
            q.adds,
            binary(q.bytes_needed),
            binary(q.bytes_read),
            f"{q.amplification:.2f}",
            f"{q.amplification_whole_columns:.2f}",
            f"{q.mean:,.1f}",
            str(q.missing),
        )
    console.print(table)
    console.print(
        f"  Amplification: bytes read / bytes needed, with lines of {binary(r.line_bytes)}. "
        f"A long trip takes {r.minutes_per_mile:.4f} minutes in the air for each mile.\n"
        "  Every sum equals numpy's; missing values are left out and counted.\n"
        f"  [dim]{escape(r.path)}[/dim]\n"
    )


# The picture.


def draw(result: DemoResult, path: Path) -> None:
    """Draw three panels, one a part, into a PNG.

    Raises
    ------
    MissingFileError
        When matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingFileError(
            "the picture needs matplotlib: pip install 'flashwarp[demo]'"
        ) from error
    spacing = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.1)
    figure = Figure(figsize=(15, 5.2), dpi=160, layout=spacing)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1, 1.1))
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    _draw_features(left, result.features)
    _draw_graph(middle, result.graph)
    _draw_table(right, result.table)
    figure.suptitle(
        f"flashwarp demo on {result.device}", x=0.01, ha="left", fontsize=11, color="0.35"
    )
    figure.savefig(path)


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.text(0, 1.025, subtitle, transform=axes.transAxes, fontsize=9, color="0.35")


def _draw_features(axes: Axes, r: FeaturesResult) -> None:
    colours = {
        (True, "cold"): _OURS,
        (True, "warm"): _OURS_LIGHT,
        (False, "cold"): _THEIRS,
        (False, "warm"): _THEIRS_LIGHT,
    }
    names = [f"{p.contender}\n{p.state}" for p in r.passes]
    rates = [p.rows_per_s / 1e3 for p in r.passes]
    bars = axes.barh(
        range(len(rates)),
        rates,
        height=0.68,
        color=[colours["flashwarp" in p.contender, p.state] for p in r.passes],
    )
    labels = axes.bar_label(bars, [thousands(1e3 * rate) for rate in rates], padding=4, fontsize=9)
    for label in labels:
        # The line of the disk's ceiling must not strike them out.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        label.set_zorder(3)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(*rates, r.ceiling.random_reads_per_s / 1e3))
    axes.set_xlabel("thousand rows a second")
    if r.ceiling.random_reads_per_s:
        limit = r.ceiling.random_reads_per_s / 1e3
        axes.axvline(limit, color=_LIMIT, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"disk, every row a read: {limit:.3g} k",
            (limit, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=_LIMIT,
        )
    _title(
        axes,
        "Feature rows in mini-batches",
        f"rows of {binary(r.row_bytes)}, file {binary(r.file_bytes)}, "
        f"flashwarp's cache {binary(r.cache_bytes)}",
    )


def _draw_graph(axes: Axes, r: GraphResult) -> None:
    search = r.searches[0]
    levels = range(len(search.levels))
    read = [level.bytes_read / 1e6 for level in search.levels]
    needed = [level.bytes_needed / 1e6 for level in search.levels]
    width = 0.38
    axes.bar(
        [x - width / 2 for x in levels],
        needed,
        width,
        color=_OURS_LIGHT,
        label="needed by the level",
    )
    axes.bar([x + width / 2 for x in levels], read, width, color=_OURS, label="read from the file")
    file_mb = r.file_bytes / 1e6
    axes.axhline(file_mb, color=_LIMIT, linewidth=1.2, linestyle="--")
    axes.text(
        len(read) - 0.45,
        file_mb,
        "whole file",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color=_LIMIT,
    )
    axes.set_ylim(0, 1.22 * max(file_mb, *read))
    axes.set_xticks(list(levels), [str(level) for level in levels])
    axes.set_xlabel("distance from the source")
    axes.set_ylabel("megabytes")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    _title(
        axes,
        "Breadth-first search, level by level",
        f"{thousands(r.vertices)} vertices, {thousands(r.entries)} entries, cache "
        f"{binary(r.cache_bytes)}: {thousands(search.teps)} TEPS",
    )


def _draw_table(axes: Axes, r: TableResult) -> None:
    names = [f"{q.name}\n{q.adds.split()[-1]}" for q in r.queries]
    width = 0.38
    series = (
        (-width / 2, [q.amplification_whole_columns for q in r.queries], _THEIRS, "whole columns"),
        (width / 2, [q.amplification for q in r.queries], _OURS, "flashwarp"),
    )
    for shift, values, colour, label in series:
        bars = axes.bar(
            [x + shift for x in range(len(values))], values, width, color=colour, label=label
        )
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=7.5)
    axes.set_ylim(0, 1.2 * max(q.amplification_whole_columns for q in r.queries))
    axes.set_ylabel("bytes read / bytes needed")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    _title(
        axes,
        "I/O amplification of a query",
        f"{r.rows:,} flights; {r.selected:,} of at least {r.miles_min:,.0f} miles "
        f"({r.selectivity:.2%})",
    )
