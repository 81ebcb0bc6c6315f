"""Breadth-first search on graphs larger than the cache: BaM's figures 7 to 11 and AGILE's 11.

Each figure is the mean over several sources with more than two neighbours, as in BaM. The rate
counts the entries of all lists that the searches read.
"""

from __future__ import annotations

from benchmarks.graphs.base import Papers
from benchmarks.graphs.parts import benchmark
from benchmarks.graphs.solve import Search

__all__ = ["run"]

run = benchmark(
    "Breadth-first search",
    lambda device, graph, sources: Search(device, graph, graph.pick_sources(sources, seed=1)),
    Papers(
        cached_over_none="11.9 (BaM Fig. 8)",
        reuse_over_naive="6.07 (BaM Fig. 8)",
        four_drives="3.48 of 4 (BaM 5.2)",
        kinds=(("PM1735", "1.0 (BaM Fig. 9)"), ("980 Pro", "1 / 3.21 (BaM Fig. 9)")),
        interface=(
            ("kron", "1 / 1.93 of what BaM's takes (AGILE Fig. 11)"),
            ("urand", "1 / 2.27 of what BaM's takes (AGILE Fig. 11)"),
        ),
    ),
)
