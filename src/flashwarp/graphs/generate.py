"""The generated graphs of the GAP benchmark suite, Kronecker and uniform random.

A graph has 2**scale vertices, and `edge_factor` undirected edges drawn for each. A random
permutation renames the vertices, so that a hub's neighbours are not neighbours in the file. Each
chunk of edges has its own random stream, so the graph depends on the seed and not on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError
from flashwarp.graphs.edges import Edges, EdgeSource, parallel_map

EDGE_FACTOR = 16
SCALE_MAX = 32
# Chances of the four quadrants (top left, top right, bottom left) at each level, as 16-bit
# thresholds: the rounding moves a chance by less than 1e-5.
_A, _AB, _ABC = (round(65536 * p) for p in (0.57, 0.57 + 0.19, 0.57 + 0.19 + 0.19))
# Edges made at a time: the scratch arrays of a chunk stay in a core's caches.
_CHUNK_EDGES = 1 << 18


def kronecker(scale: int, edge_factor: int = EDGE_FACTOR, seed: int = 1) -> EdgeSource:
    """Draw a Kronecker graph: RMAT with a, b, c = 0.57, 0.19, 0.19, as in Graph500.

    Examples
    --------
    >>> sum(len(edges.source) for edges in kronecker(scale=4).edges)
    256
    """
    return _source(scale, edge_factor, seed, rmat_chunk)


def uniform(scale: int, edge_factor: int = EDGE_FACTOR, seed: int = 1) -> EdgeSource:
    """Draw a uniform random graph: each end of an edge is any vertex, with equal chance.

    Examples
    --------
    >>> sum(len(edges.source) for edges in uniform(scale=4).edges)
    256
    """
    return _source(scale, edge_factor, seed, _uniform_chunk)


Ends = tuple[NDArray[np.uint32], NDArray[np.uint32]]
Draw = Callable[[np.random.Generator, int, int], Ends]


def _source(scale: int, edge_factor: int, seed: int, draw: Draw) -> EdgeSource:
    scale, edge_factor = integer("scale", scale), integer("edge_factor", edge_factor)
    seed = integer("seed", seed, 0, SIZE_MAX)
    if not 1 <= scale <= SCALE_MAX:
        raise ArgumentError(f"scale {scale}: 2**scale vertices need a scale of 1 to {SCALE_MAX}")
    if edge_factor < 1:
        raise ArgumentError(f"edge_factor {edge_factor}: at least one edge a vertex")
    count = edge_factor << scale
    names = np.arange(1 << scale, dtype=np.uint32)
    np.random.default_rng([seed, 0]).shuffle(names)

    def chunk(number: int) -> Edges:
        random = np.random.default_rng([seed, 1, number])
        source, target = draw(random, scale, min(_CHUNK_EDGES, count - number * _CHUNK_EDGES))
        return Edges(names[source], names[target])

    edges = parallel_map(chunk, range(-(-count // _CHUNK_EDGES)))
    return EdgeSource(1 << scale, edges, symmetric=True, count=count)


def rmat_chunk(random: np.random.Generator, scale: int, count: int) -> Ends:
    """Draw `count` directed edges, before vertices are renamed."""
    source = np.zeros(count, dtype=np.uint32)
    target = np.zeros(count, dtype=np.uint32)
    for _ in range(scale):
        draw = random.integers(0, 65536, count, dtype=np.uint16)
        bottom = draw >= _AB
        right = ((draw >= _A) & ~bottom) | (draw >= _ABC)
        source += source
        source += bottom
        target += target
        target += right
    return source, target


def _uniform_chunk(random: np.random.Generator, scale: int, count: int) -> Ends:
    limit = 1 << scale
    return (
        random.integers(0, limit, count, dtype=np.uint32),
        random.integers(0, limit, count, dtype=np.uint32),
    )
