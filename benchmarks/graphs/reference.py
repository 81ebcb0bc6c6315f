"""The answers that device kernels are judged by: scipy's in memory, and rules for larger graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp.graphs.csr import CsrGraph
from flashwarp.graphs.edges import parallel_map

__all__ = [
    "UNREACHED",
    "check_components",
    "check_distances",
    "reference_components",
    "reference_distances",
]

# Entries that a check looks at in one piece, unless one list is longer.
_PART_ENTRIES = 1 << 22
# Farther than any vertex: where nobody came.
_FAR = 1 << 40

UNREACHED = 0xFFFFFFFF
"""Distance of a vertex that a search has not reached."""


def reference_components(matrix: Any) -> NDArray[np.uint32]:
    """Return the smallest vertex of the component of each vertex."""
    from scipy.sparse.csgraph import connected_components

    _, labels = connected_components(matrix, directed=False)
    _, first = np.unique(labels, return_index=True)
    smallest: NDArray[np.uint32] = first[labels].astype(np.uint32)
    return smallest


def reference_distances(matrix: Any, source: int) -> NDArray[np.uint32]:
    """Search with scipy.sparse.csgraph, the whole graph in memory."""
    from scipy.sparse.csgraph import breadth_first_order

    order, parent = breadth_first_order(matrix, source, directed=True)
    distances = np.full(matrix.shape[0], UNREACHED, dtype=np.uint32)
    distances[order[0]] = 0
    rest, level = order[1:], 0
    while len(rest):
        # Breadth-first order: the children of a level come before those of the next.
        at_level = distances[parent[rest]] == level
        distances[rest[at_level]] = level + 1
        rest = rest[~at_level]
        level += 1
    return distances


def check_distances(graph: CsrGraph, source: int, distances: NDArray[np.uint32]) -> bool:
    """Tell whether these are the distances, by rules that only the right ones keep.

    The source is at 0, everybody else who was reached has a neighbour one step nearer, and along no
    edge the distance grows by more than one: so it is neither too short nor too long. Reads all
    lists once; works for graphs that scipy could not hold. Source and distances are by label.
    """
    distances, source = graph.by_vertex(distances), graph.vertex_of(source)
    if distances[source] != 0 or int((distances == 0).sum()) != 1:
        return False
    steps = distances.astype(np.int64)
    steps[distances == UNREACHED] = _FAR
    return all(parallel_map(lambda part: _rules_hold(part, steps), _parts_of(graph)))


def check_components(graph: CsrGraph, labels: NDArray[np.uint32]) -> bool:
    """Tell whether no edge joins two components, and each is named by its smallest label.

    Components that should be one and are two are found; to find two that were joined takes scipy.
    """
    vertices = np.arange(graph.vertices)
    if not (labels <= vertices).all() or not (labels[labels] == labels).all():
        return False
    labels = graph.by_vertex(labels)

    def same(part: _Part) -> bool:
        mine = np.repeat(labels[part.rows], part.degrees)
        return bool((mine == labels[part.ends]).all())

    return all(parallel_map(same, _parts_of(graph)))


@dataclass(frozen=True)
class _Part:
    """The lists of some vertices that follow each other."""

    rows: slice
    degrees: NDArray[np.int64]
    ends: NDArray[np.uint32]


def _parts_of(graph: CsrGraph) -> Iterator[_Part]:
    lists = np.load(graph.neighbours_path, mmap_mode="r")
    first = 0
    while first < graph.vertices:
        limit = graph.offsets[first] + _PART_ENTRIES
        last = max(first + 1, int(np.searchsorted(graph.offsets, limit, side="right")) - 1)
        rows = slice(first, min(last, graph.vertices))
        ends = lists[graph.offsets[rows.start] : graph.offsets[rows.stop]]
        yield _Part(rows, graph.degrees[rows], ends)
        first = rows.stop


def _rules_hold(part: _Part, steps: NDArray[np.int64]) -> bool:
    mine, theirs = steps[part.rows], steps[part.ends]
    if (theirs > np.repeat(mine, part.degrees) + 1).any():
        return False
    some = part.degrees > 0
    starts = (np.cumsum(part.degrees) - part.degrees)[some]
    nearest = np.full(len(mine), _FAR)
    if len(starts):
        nearest[some] = np.minimum.reduceat(theirs, starts)
    reached = (mine > 0) & (mine < _FAR)
    return bool((nearest[reached] == mine[reached] - 1).all())
