"""Connected components on graphs larger than the cache: BaM's figures 7 to 11.

Edges join the trees of their ends (the link and compress steps of Afforest), and trees are
flattened between launches. Every way reads each entry once, as in BaM: none leaves out the lists of
the largest component, as Afforest can.
"""

from __future__ import annotations

from benchmarks.graphs.base import Papers
from benchmarks.graphs.parts import benchmark
from benchmarks.graphs.solve import Components

__all__ = ["run"]

run = benchmark(
    "Connected components",
    lambda device, graph, _: Components(device, graph),
    Papers(
        cached_over_none="12.65 (BaM Fig. 8)",
        reuse_over_naive="11.24 (BaM Fig. 8)",
        four_drives="4 of 4 (BaM 5.2)",
        kinds=(("PM1735", "1.0 (BaM Fig. 9)"), ("980 Pro", "1 / 2.68 (BaM Fig. 9)")),
    ),
)
