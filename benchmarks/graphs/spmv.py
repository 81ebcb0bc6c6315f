"""A sparse matrix times a vector, both steps of its interface: AGILE's Figure 11.

The matrix is a generated graph in compressed sparse rows, with a value for each entry; columns and
values are two arrays on one cache. Every product is compared with scipy's.
"""

from __future__ import annotations

from benchmarks.graphs.base import Papers
from benchmarks.graphs.parts import benchmark
from benchmarks.graphs.solve import Product

__all__ = ["run"]

run = benchmark(
    "Sparse matrix times vector",
    lambda device, graph, _: Product(device, graph),
    Papers(
        interface=(
            ("kron", "1 / 3.17 of what BaM's takes (AGILE Fig. 11)"),
            ("urand", "1 / 2.11 of what BaM's takes (AGILE Fig. 11)"),
        ),
    ),
    parts="interface",
)
