"""What the demo shows when it is done: plain text, and a picture.

Numbers come from the results as they are; nothing is rounded before it is compared, and units are
decimal (GB = 10**9 bytes) except for sizes that are powers of two (KiB, MiB, GiB).
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import overview
from demo.checkpoint import FILE, CheckpointResult
from demo.features import OURS, FeaturesResult, Rate
from demo.graph import GraphResult
from demo.table import TableResult
from flashwarp.errors import MissingFileError
from flashwarp.probe.text import aligned, binary, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DemoResult", "as_dict", "draw", "text"]

# One colour for flashwarp, one for all others, one for ceilings.
_OURS, _THEIRS, _LIMIT = "#0f766e", "#9aa1ac", "#b45309"
_SPEEDS = ("time", "", "edges/s")


@dataclass(frozen=True)
class DemoResult:
    """The four parts, and where they ran."""

    device: str
    directory: str
    size: str
    compile_seconds: float  # for all kernels, once: no other figure contains it
    seconds: float
    features: FeaturesResult
    graph: GraphResult
    table: TableResult
    checkpoint: CheckpointResult


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
    on_gpu = result.features.on_gpu
    parts = [
        "Every answer was right: each row equals numpy's, each distance scipy's, each sum numpy's.",
        _features_text(result.features),
        _graph_text(result.graph, on_gpu),
        _table_text(result.table),
        _checkpoint_text(result.checkpoint, on_gpu),
        f"All of this is from this run, on {result.device}. It took {result.seconds:.0f} s.\n"
        f"Kernels were compiled or loaded in {result.compile_seconds:.1f} s, once; no figure "
        "contains that.",
    ]
    if not on_gpu:
        parts.append(_records_text())
    return "\n\n".join(parts)


def _features_text(r: FeaturesResult) -> str:
    where = "GPU" if r.on_gpu else "host"
    lines = [
        f"ROWS of {binary(r.row_bytes)} from a file of {binary(r.file_bytes)} to {where} memory; "
        f"cache {binary(r.cache_bytes)}",
        "  From the disk, random rows that nobody asked for before:",
        *(_disk_text(r) if r.on_gpu else []),
        f"    {r.rows_asked:,} rows were asked for, and {r.rows_read:,} rows were read.",
        _indent(f"{r.cold_note}\n{_wrapped(f'Route {r.path}.')}", 4),
    ]
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


def _disk_text(r: FeaturesResult) -> list[str]:
    most = {rate.how: rate for rate in r.disk}.values()  # the last of each way
    ceiling = r.ceiling.random_reads_per_s
    rows = [(f"{rate.how}, {rate.call_rows:,} a call", *_rate_cells(rate, r)) for rate in most]
    if not ceiling:
        return [_indent(aligned(rows), 4), f"    The ceiling was {r.ceiling.note}."]
    rows.append(("the disk's ceiling", f"{thousands(ceiling)} reads/s", _gb(ceiling * r.row_bytes)))
    share = f"    That is {r.of_ceiling:.0%} of the ceiling ({r.ceiling.note})."
    return [_indent(aligned(rows), 4), share]


def _rate_cells(rate: Rate, r: FeaturesResult) -> tuple[str, str]:
    return f"{thousands(rate.rows_per_s)} rows/s", _gb(rate.rows_per_s * r.row_bytes)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _graph_text(r: GraphResult, on_gpu: bool) -> str:
    head = (
        f"SEARCH, breadth first: {thousands(r.vertices)} vertices, {thousands(r.entries)} "
        f"neighbours in {binary(r.file_bytes)} on the disk; cache {binary(r.cache_bytes)}"
    )
    rows = [("source", "reached", "read", "of the file", *_SPEEDS * on_gpu)]
    for s in r.searches:
        speeds = f"{s.seconds:.2f} s", _gb(s.bytes_read / s.seconds), thousands(s.teps)
        read = binary(s.bytes_read), f"{s.bytes_read / r.file_bytes:.2f}"
        rows.append((str(s.source), f"{s.reached:,}", *read, *speeds * on_gpu))
    tail = "scipy finds the same distances in host memory, with the graph loaded before"
    took = f", in {r.reference_seconds:.2f} s" if on_gpu else ""
    return f"{head}\n{_indent(aligned(rows), 2)}\n  {tail}{took}."


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


def _checkpoint_text(r: CheckpointResult, on_gpu: bool) -> str:
    head = f"CHECKPOINTS: {r.versions} states of {binary(r.state_bytes)} saved, and restored"
    if not on_gpu:
        return f"{head}: the last first, each with its bits."
    rows = [
        (f"{OURS}, until the state may change", _time(r.held_s)),
        (f"{OURS}, until it is durable", _time(r.durable_s)),
        (FILE, _time(r.file_s)),
    ]
    return f"{head}, the last first; how long each took\n{_indent(aligned(rows), 2)}"


def _records_text() -> str:
    head = f"WHAT A GPU GIVES: {overview.machine()}, from the records in results/, not this machine"
    rows = [("", OURS, "of", "otherwise")]
    for each in overview.comparisons():
        ours, limit, other = map(overview.figure, (each.ours, each.limit, each.other))
        rows.append((each.title, f"{ours} {each.unit}", limit, other))
    return f"{head}\n{_indent(aligned(rows), 2)}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, 94, subsequent_indent="  ")


def _indent(lines: str, by: int) -> str:
    return "\n".join(" " * by + line for line in lines.splitlines())


# The picture.


def draw(result: DemoResult, path: Path) -> None:
    """Draw what this run has shown into a PNG; without a GPU, and what a GPU gave by the records.

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
    on_gpu = result.features.on_gpu
    panels = 3 if result.features.page_cache else 2
    with rc_context({"font.size": 13, "axes.linewidth": 1.2}):
        figure = Figure(figsize=(8 * panels, 6.6), dpi=120, layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        if result.features.page_cache:
            _draw_page_cache(axes[0], result.features)
        _draw_query(axes[-2], result.table)
        if on_gpu:
            _draw_checkpoint(axes[-1], result.checkpoint)
        else:
            _draw_records(axes[-1])
        figure.suptitle(
            "Every answer was right, from files larger than the cache",
            x=0.01,
            ha="left",
            fontsize=20,
            fontweight="bold",
        )
        note = "" if on_gpu else ", which is for development and tests"
        figure.supxlabel(
            f"flashwarp demo on {result.device}{note}", x=0.01, ha="left", fontsize=12, color="0.4"
        )
        figure.savefig(path)


def _bars(
    axes: Axes, names: list[str], values: list[float], colours: list[str], labels: list[str]
) -> None:
    bars = axes.barh(range(len(values)), values, height=0.66, color=colours)
    for label in axes.bar_label(bars, labels, padding=5):
        # The line of a ceiling must not strike a figure out.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _draw_page_cache(axes: Axes, r: FeaturesResult) -> None:
    rates = sorted(r.page_cache, key=lambda rate: -rate.rows_per_s)
    speeds = [rate.rows_per_s * r.row_bytes / 1e9 for rate in rates]
    colours = [_OURS if rate.how == OURS else _THEIRS for rate in rates]
    names = [rate.how.replace(", ", ",\n") for rate in rates]
    _bars(axes, names, speeds, colours, [f"{speed:.1f}" for speed in speeds])
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
    axes.set_title(
        f"Rows of {binary(r.row_bytes)} in the page cache, {hits:.0%} hits", loc="left", pad=34
    )


def _draw_query(axes: Axes, r: TableResult) -> None:
    names, values, colours, labels = [], [], [], []
    for q in r.queries:
        names += [f"{q.name} {q.adds}", ""]
        values += [q.bytes_read / 2**20, q.bytes_whole_columns / 2**20]
        colours += [_OURS, _THEIRS]
        labels += [f"{values[-2]:.1f}", f"{values[-1]:.1f}"]
    _bars(axes, names, values, colours, labels)
    axes.set_xlabel("MiB read; gray: all columns of the query")
    axes.set_title(
        f"A query that selects {r.selectivity:.2%} of {r.rows:,} flights", loc="left", pad=34
    )


def _draw_checkpoint(axes: Axes, r: CheckpointResult) -> None:
    names = [f"{OURS},\nuntil the state\nmay change", FILE.replace(", ", ",\n")]
    seconds = [r.held_s, r.file_s]
    _bars(axes, names, [1e3 * s for s in seconds], [_OURS, _THEIRS], [_time(s) for s in seconds])
    axes.set_xlabel("milliseconds that the program waits")
    axes.set_title(f"A state of {binary(r.state_bytes)} is saved", loc="left", pad=34)


def _draw_records(axes: Axes) -> None:
    names, values, colours, labels = [], [], [], []
    for each in overview.comparisons():
        names += [textwrap.fill(each.title, 30), ""]
        values += [100 * each.ours / each.limit, 100 * each.other / each.limit]
        colours += [_OURS, _THEIRS]
        labels += [f"{overview.figure(value)} {each.unit}" for value in (each.ours, each.other)]
    _bars(axes, names, values, colours, labels)
    axes.axvline(100, color=_LIMIT, linewidth=2, linestyle="--", zorder=0)
    axes.set_xlim(0, 138)
    axes.set_xlabel("percent of the ceiling; gray: the alternative")
    axes.set_title(f"{overview.machine()}, by stored records", loc="left", pad=34)
