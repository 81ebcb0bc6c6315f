"""Hit rates of all policies beside Belady's optimum, over sizes of the cache: table, JSON, plot."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flashwarp.errors import ArgumentError
from flashwarp.policy import POLICIES, Policy
from flashwarp.probe.plots import new_figure
from flashwarp.probe.text import aligned
from flashwarp.storage import files
from flashwarp.trace.belady import min_misses, min_misses_in_sets
from flashwarp.trace.format import Trace
from flashwarp.trace.replay import replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN = "MIN"
MIN_IN_SETS = "MIN in sets"
# Shares of the trace's different lines.
_TITLE_MAX = 80
SHARES = (0.01, 0.03, 0.1, 0.3, 0.6)


@dataclass(frozen=True)
class Comparison:
    """Hit rates of one trace.

    Attributes
    ----------
    trace : str
        Its name.
    accesses, footprint : int
        Its length, and how many different lines it touches.
    ways : int
        Frames of a set.
    capacities : tuple of int
        Lines that the cache held.
    hit_rates : dict
        By policy, "MIN in sets" and "MIN": a hit rate for each capacity. MIN is Belady's optimum;
        in sets, with the sets of the cache.
    """

    trace: str
    accesses: int
    footprint: int
    ways: int
    capacities: tuple[int, ...]
    hit_rates: dict[str, tuple[float, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return it for people."""
        rows = [("cache, lines", *(f"{capacity:,}" for capacity in self.capacities))]
        rows += [(name, *(f"{r:.1%}" for r in rates)) for name, rates in self.hit_rates.items()]
        return (
            f"{self.trace}: hit rates of {self.accesses:,} accesses to {self.footprint:,} lines, "
            f"{self.ways} ways\n{aligned(rows)}"
        )


def compare(
    trace: Trace,
    *,
    capacities: Sequence[int] = (),
    policies: Sequence[str | Policy] = tuple(POLICIES),
    ways: int = 8,
) -> Comparison:
    """Replay a trace under each policy in caches of these sizes, and compute the optimum.

    Parameters
    ----------
    trace : Trace
    capacities : sequence of int, optional
        Lines; default 1, 3, 10, 30 and 60 % of those that the trace touches.
    policies : sequence of str or Policy
        Default: all of flashwarp's own.
    ways : int
        Frames of a set: 4, 8 or 16.

    Notes
    -----
    Blocks for about a microsecond an access, a policy and a size, and twice that for the optimum.
    """
    if len(trace) == 0:
        raise ArgumentError(f"the trace {trace.name!r} is empty: record calls that read rows")
    footprint = trace.footprint
    sizes = list(capacities) or [max(ways, round(share * footprint)) for share in SHARES]
    rates: dict[str, list[float]] = {}
    actual = []
    lines = trace.numbered_densely().lines
    for size in sizes:
        done = [replay(trace, policy, capacity_lines=size, ways=ways) for policy in policies]
        for each in done:
            rates.setdefault(each.policy, []).append(each.hit_rate)
        capacity = done[0].capacity_lines
        actual.append(capacity)
        in_sets = min_misses_in_sets(lines, capacity // ways, ways)
        rates.setdefault(MIN_IN_SETS, []).append(1 - in_sets / len(lines))
        rates.setdefault(MIN, []).append(1 - min_misses(lines, capacity) / len(lines))
    return Comparison(
        trace=trace.name,
        accesses=len(trace),
        footprint=footprint,
        ways=ways,
        capacities=tuple(actual),
        hit_rates={name: tuple(each) for name, each in rates.items()},
    )


def save(comparisons: Sequence[Comparison], path: str | os.PathLike[str], **facts: Any) -> None:
    """Write comparisons and other facts as JSON, to a file that appears whole or not at all."""
    content = {**facts, "comparisons": [each.as_dict() for each in comparisons]}
    with files.replacing(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def plot(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> None:
    """Draw hit rates over the size of the cache, a panel a trace, to a PNG, SVG or PDF file.

    Raises
    ------
    MissingFileError
        When matplotlib is not installed.
    """
    columns = min(2, len(comparisons))
    rows = -(-len(comparisons) // columns)
    figure = new_figure(6.0 * columns, 4.2 * rows)
    for number, each in enumerate(comparisons, 1):
        panel = figure.add_subplot(rows, columns, number)
        panel.set_title(f"{each.trace}, {each.ways} ways"[:_TITLE_MAX])
        draw(each, panel)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ArgumentError(f"{os.fspath(path)}: {error}") from error


def draw(comparison: Comparison, panel: Axes) -> None:
    """Draw hit rates over the size of the cache."""
    from matplotlib import rcParams

    ink = rcParams["text.color"]
    shares = [100 * n / comparison.footprint for n in comparison.capacities]
    for name, rates in comparison.hit_rates.items():
        bound = name in (MIN, MIN_IN_SETS)
        style = {"color": ink, "linestyle": "-" if name == MIN else "--"} if bound else {}
        panel.plot(shares, [100 * r for r in rates], label=name, marker="o", markersize=3, **style)
    panel.set_xlabel("cache, % of the lines touched")
    panel.set_ylabel("hits, %")
    panel.set_ylim(0, 100)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
