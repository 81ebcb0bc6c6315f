"""Plots by matplotlib, which is an extra; as SVG that stands in a page and takes its colours."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flashwarp.errors import MissingFileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, THEIRS = "#0d9488", "#8b94a3"
# Colours that stand for the page's own, which differ between light and dark.
_INK, _GRID = "#010203", "#040506"
_THEMED = {_INK: "var(--ink)", _GRID: "var(--grid)"}
_INCHES = 7.2
_NAME_COLUMNS = 38
# From such a ratio on, small values would be no bars on a linear scale.
_DECADES = 100


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of so many inches; raises MissingFileError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        why = "the plot needs matplotlib: pip install 'flashwarp[plot]'"
        raise MissingFileError(why) from error
    return Figure(figsize=(width, height), layout="constrained")


def inline_svg(height: float, draw: Callable[[Axes], None]) -> str:
    """Draw one panel, and return it as SVG without header, metadata or links."""
    new_figure(1, 1)  # says what to install
    from matplotlib import rc_context

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    style = {
        **colours,
        "axes.edgecolor": _GRID,
        "grid.color": _GRID,
        "legend.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10.0,
    }
    with rc_context(style), io.StringIO() as file:
        figure = new_figure(_INCHES, height)
        draw(figure.add_subplot())
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for colour, ours in _THEMED.items():
        text = text.replace(colour, ours)
    return text


def bars(
    names: Sequence[str], values: Sequence[float], unit: str, beside: Sequence[float] = ()
) -> str:
    """Return values as bars, each with a mark at what it stands beside (0: nothing)."""
    shown = [each for each in (*values, *beside) if each > 0]

    def draw(panel: Axes) -> None:
        places = range(len(names))
        if shown and max(shown) > _DECADES * min(shown):
            panel.set_xscale("log")
        else:
            panel.locator_params(axis="x", nbins=6)
        panel.barh(places, values, color=OURS, height=0.62)
        for place, value in enumerate(beside):
            if value:
                panel.plot([value, value], [place - 0.4, place + 0.4], color=_INK, linewidth=2)
        panel.set_yticks(list(places), [_short(name) for name in names])
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_xlabel(unit + ("; the mark is what it is compared with" if any(beside) else ""))
        panel.grid(axis="x", alpha=0.6)
        panel.set_axisbelow(True)

    return inline_svg(0.8 + 0.36 * len(names), draw)


def _short(name: str) -> str:
    return "\n".join(textwrap.wrap(name, _NAME_COLUMNS, max_lines=2, placeholder="…"))


def accesses(lines: Any, panel: Axes) -> None:
    """Draw which lines are used when, as a map of densities."""
    import numpy as np

    counts, x, y = np.histogram2d(np.arange(len(lines)), lines, bins=(160, 80))
    shown = np.ma.masked_equal(counts.T, 0)
    panel.pcolormesh(x, y, shown, cmap="viridis", vmin=-0.4 * counts.max(), rasterized=True)
    panel.set_xlabel("access")
    panel.set_ylabel("line")


def popularity(lines: Any, panel: Axes) -> None:
    """Draw what share of all accesses the most popular lines have."""
    import numpy as np

    counts = np.sort(np.unique(lines, return_counts=True)[1])[::-1]
    share = 100 * np.cumsum(counts) / counts.sum()
    panel.plot(100 * np.arange(1, len(counts) + 1) / len(counts), share, color=OURS)
    panel.plot([0, 100], [0, 100], color=THEIRS, linestyle="--", linewidth=1)
    panel.set_xlabel("most popular lines, %")
    panel.set_ylabel("accesses, %")
    panel.set_ylim(0, 102)
    panel.grid(alpha=0.6)
