"""What scipy finds on the whole graph in memory: the answers that device kernels are judged by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNREACHED", "reference_components", "reference_distances"]

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
    return _distances_of_tree(order, parent, matrix.shape[0])


def _distances_of_tree(
    order: NDArray[np.int32], parent: NDArray[np.int32], vertices: int
) -> NDArray[np.uint32]:
    distances = np.full(vertices, UNREACHED, dtype=np.uint32)
    distances[order[0]] = 0
    rest, level = order[1:], 0
    while len(rest):
        # Breadth-first order: the children of a level come before those of the next.
        at_level = distances[parent[rest]] == level
        distances[rest[at_level]] = level + 1
        rest = rest[~at_level]
        level += 1
    return distances
