"""Graphs larger than memory: compressed sparse rows in .npy files, made from many inputs.

`load` takes files of users (a Matrix Market file, an edge list, a `.npz` of scipy, a folder made
before), and generated graphs for benchmarks (`kron:SCALE` and `urand:SCALE` of the GAP benchmark
suite). Device code for such graphs is in `flashwarp/graph.cuh`.
"""

from __future__ import annotations

from flashwarp.graphs.build import write_csr
from flashwarp.graphs.csr import CsrGraph
from flashwarp.graphs.edges import Edges, EdgeSource
from flashwarp.graphs.generate import kronecker, uniform
from flashwarp.graphs.inputs import load, source_of
from flashwarp.graphs.order import by_degree
from flashwarp.graphs.rows import Rows

__all__ = [
    "CsrGraph",
    "EdgeSource",
    "Edges",
    "Rows",
    "by_degree",
    "kronecker",
    "load",
    "source_of",
    "uniform",
    "write_csr",
]
