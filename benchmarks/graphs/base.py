"""What all parts of the graph benchmarks share: options, turns, rows.

`GraphBench` holds the device, the compiled kernels and the report. Each part is a function over it,
in `graph_ways.py` (ways to reach the lists), `graph_drives.py` (modelled drives) and
`graph_interface.py` (what the interface costs).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.graphs.solve import KERNELS, Algorithm, Reader
from flashwarp import graphs
from flashwarp.device import Device
from flashwarp.probe.timing import in_turns

__all__ = ["GraphBench", "Options", "Papers", "cache_bytes"]


@dataclass(frozen=True)
class Papers:
    """Figures of the papers, for comparison."""

    cached_over_none: str = ""
    reuse_over_naive: str = ""
    four_drives: str = ""
    kinds: tuple[tuple[str, str], ...] = ()
    """By the name of a modelled drive."""
    interface: tuple[tuple[str, str], ...] = ()
    """By the generator of the graph."""


@dataclass(frozen=True)
class Options:
    """What a run measures; all sizes are text, as `flashwarp.open` takes them."""

    line: str = "4 KiB"
    file_line: str = "64 KiB"
    share: float = 0.5
    """Size of the cache in sizes of the lists."""
    slower: float = 1
    """Divides the ceilings of the modelled drives."""
    sources: int = 1
    """Searches of which the mean is taken, for algorithms that start somewhere."""
    runs: int = 3


@dataclass
class GraphBench:
    """One algorithm on one device."""

    device: Device
    report: Record
    make: Callable[[Device, graphs.CsrGraph], Algorithm]
    papers: Papers
    options: Options
    measured: dict[Hashable, tuple[float, bool, str]] = field(default_factory=dict)
    """What several figures have in common, so that it is measured once."""

    def __post_init__(self) -> None:
        self.program = fw.compile(KERNELS, self.device)

    def turns(
        self, algorithm: Algorithm, ways: Mapping[str, Callable[[], float]]
    ) -> tuple[dict[str, float], dict[str, bool]]:
        """Rates of all ways, in billions of entries a second, and whether each was right."""
        right: dict[str, bool] = {}

        def measured(name: str, way: Callable[[], float]) -> float:
            seconds = way()
            if name not in right:
                right[name] = algorithm.right()
            return seconds

        seconds = in_turns(
            {name: partial(measured, name, way) for name, way in ways.items()}, self.options.runs
        )
        return {name: algorithm.entries / taken / 1e9 for name, taken in seconds.items()}, right

    def add(
        self,
        name: str,
        rate: float,
        right: bool,
        footprint: int,
        against: str = "",
        reference: float = 0.0,
        target: float = 0.0,
        paper: str = "",
        note: str = "",
    ) -> None:
        """Add a rate; without `against` it stands alone."""
        reference = reference if against else 0.0
        unit = "G entries/s"
        self.report.row(name, rate, unit, against, reference, target, right, paper, note, footprint)

    def algorithm(self, stack: ExitStack, graph: graphs.CsrGraph) -> Algorithm:
        """Make the algorithm for a graph, closed with the stack."""
        algorithm = self.make(self.device, graph)
        stack.callback(algorithm.close)
        return algorithm

    def reader(
        self,
        stack: ExitStack,
        graph: graphs.CsrGraph,
        array: fw.Array,
        in_place: int = 0,
        values: fw.Array | None = None,
    ) -> Reader:
        """Make a reader of the graph's lists, closed with the stack."""
        reader = Reader(self.program, graph, array, in_place, values=values)
        stack.callback(reader.close)
        return reader

    def open_memory(self, storage: Any, cache: float) -> fw.Array:
        """Open lists in memory, with so many bytes of cache."""
        return fw.open(
            storage,
            "r",
            "uint32",
            device=self.device,
            cache=cache_bytes(cache),
            line=self.options.line,
        )


def cache_bytes(wanted: float) -> int:
    """As large as wanted, if that is not too small to be a cache."""
    return max(int(wanted), 1 << 20)
