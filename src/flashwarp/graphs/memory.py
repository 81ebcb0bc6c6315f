"""Graphs that the caller holds in memory: edges of numpy or torch, matrices of scipy, PyG's Data.

Neither torch nor scipy is imported: what they hold is known by its members.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp.config import brief, integer
from flashwarp.errors import ArgumentError, IndexDtypeError
from flashwarp.graphs.edges import VERTICES_MAX, Edges, EdgeSource

_CHUNK_EDGES = 1 << 20


def source_in_memory(what: Any, vertices: int | None, symmetric: bool) -> EdgeSource:
    """Return the edges of a graph in memory; see `graphs.load`, which raises the same."""
    row, column, weight, known = _parts(what)
    for ends in (row, column):
        if ends.dtype.kind not in "iu":
            raise IndexDtypeError(f"vertices of dtype {ends.dtype}: give integers")
        if ends.ndim != 1 or ends.shape != row.shape:
            raise ArgumentError(f"ends of edges have shapes {row.shape} and {column.shape}")
    if weight is not None and (weight.shape != row.shape or weight.dtype.kind not in "biuf"):
        raise ArgumentError(
            f"weights of shape {weight.shape} and dtype {weight.dtype} for {len(row)} edges: give "
            "one real number for each"
        )
    least = 1 + max((int(ends.max()) for ends in (row, column) if len(ends)), default=0)
    lowest = min((int(ends.min()) for ends in (row, column) if len(ends)), default=0)
    found = known if vertices is None else vertices
    if found is None and least > VERTICES_MAX:
        raise ArgumentError(
            f"an edge has vertex {least - 1}: vertices are numbered from 0 to {VERTICES_MAX - 1}; "
            "labels, numbers = numpy.unique(edges, return_inverse=True) numbers them"
        )
    count = integer("vertices", least if found is None else found, 1, VERTICES_MAX)
    if lowest < 0 or least > count:
        wrong = lowest if lowest < 0 else least - 1
        raise ArgumentError(f"an edge has vertex {wrong}, and there are {count} vertices")
    chunks = _chunks(row, column, weight)
    return EdgeSource(count, chunks, symmetric, weight is not None, count=len(row))


def _parts(
    what: Any,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, int | None]:
    """Return both ends of all edges, their weights, and how many vertices the input says."""
    if hasattr(what, "edge_index"):  # PyG's Data
        row, column, _, _ = _parts(what.edge_index)
        weight = getattr(what, "edge_weight", None)
        return row, column, None if weight is None else _array(weight), what.num_nodes
    if hasattr(what, "tocoo"):  # a sparse matrix or array of scipy
        matrix = what.tocoo()
        if matrix.shape[0] != matrix.shape[-1]:
            raise ArgumentError(f"a matrix of shape {matrix.shape} is no graph")
        values = None if np.all(matrix.data == 1) else matrix.data
        return matrix.row, matrix.col, values, matrix.shape[0]
    pair = [_array(each) for each in what] if isinstance(what, tuple | list) else _array(what)
    if len(pair) != 2 or (not isinstance(pair, list) and pair.ndim != 2):
        many = len(pair) > 2 and pair[0].shape == (2,)
        turned = " (these are pairs: numpy.transpose(edges))" if many else ""
        raise ArgumentError(
            f"{brief(what)} is no graph: give a path, edges of shape (2, count){turned}, a sparse "
            "matrix of scipy, or a Data of PyG"
        )
    return pair[0], pair[1], None, None


def _array(values: Any) -> NDArray[Any]:
    held = values.detach().cpu() if hasattr(values, "detach") else values
    found: NDArray[Any] = np.atleast_1d(np.asarray(held))
    return found


def _chunks(
    row: NDArray[Any], column: NDArray[Any], weight: NDArray[Any] | None
) -> Iterator[Edges]:
    for first in range(0, len(row), _CHUNK_EDGES):
        part = slice(first, first + _CHUNK_EDGES)
        yield Edges(
            row[part].astype(np.uint32),
            column[part].astype(np.uint32),
            None if weight is None else weight[part].astype(np.float32),
        )
