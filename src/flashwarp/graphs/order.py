"""Number the vertices of a graph by falling degree, and keep the user's labels.

A search wants the hubs in its second or third level, and nearly all other vertices in the next. If
hubs lie anywhere, each of these levels wants a part of nearly every line. If they come first, their
lines are wanted once, and whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashwarp.errors import ArgumentError
from flashwarp.graphs.build import MEMORY_BYTES, write_csr
from flashwarp.graphs.csr import CsrGraph
from flashwarp.graphs.edges import Edges, EdgeSource, parallel_map
from flashwarp.storage import files

_PART_ENTRIES = 1 << 20


def by_degree(
    graph: CsrGraph, folder: files.PathLike, *, memory_bytes: int = MEMORY_BYTES
) -> CsrGraph:
    r"""Write a copy of a graph with its vertices numbered by falling degree.

    Parameters
    ----------
    graph : CsrGraph
        The graph; its files do not change.
    folder : path-like
        Where the copy goes: another folder.
    memory_bytes : int
        Bytes of entries held in memory; more are sorted through files.

    Returns
    -------
    CsrGraph
        The same graph, with the same labels. Vertices of one degree stay in their order.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from flashwarp import graphs
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "star.txt").write_text("0 3\n1 3\n2 3\n")
    >>> star = graphs.load(folder / "star.txt", folder / "star")
    >>> again = graphs.by_degree(star, folder / "again")
    >>> again.vertex_of(3), again.degrees.tolist(), again.labels.tolist()
    (0, [3, 1, 1, 1], [3, 0, 1, 2])
    """
    folder = Path(files.check_name(folder))
    if folder.resolve() == graph.folder.resolve():
        raise ArgumentError(f"{folder} holds the graph itself: name another folder")
    order = np.argsort(-graph.degrees, kind="stable")
    number = np.empty(graph.vertices, np.uint32)
    number[order] = np.arange(graph.vertices, dtype=np.uint32)
    source = EdgeSource(
        graph.vertices,
        _renamed(graph, number),
        symmetric=False,
        weighted=graph.weighted,
        degrees=graph.degrees[order],
        count=graph.entries,
        labels=graph.labels_of(order),
    )
    return write_csr(source, folder, memory_bytes)


def _renamed(graph: CsrGraph, number: NDArray[np.uint32]) -> Iterator[Edges]:
    """All entries as edges, a part of the file at a time."""
    lists = np.load(graph.neighbours_path, mmap_mode="r")
    weights = np.load(graph.weights_path, mmap_mode="r") if graph.weighted else None

    def part(first: int) -> Edges:
        end = min(first + _PART_ENTRIES, graph.entries)
        begin_of, end_of = graph.offsets[:-1], graph.offsets[1:]
        # The vertices whose lists have entries in [first, end).
        low = int(np.searchsorted(end_of, first, side="right"))
        high = int(np.searchsorted(begin_of, end, side="left"))
        graph._check_part(first, lists[first:end])
        counts = np.minimum(end_of[low:high], end) - np.maximum(begin_of[low:high], first)
        return Edges(
            np.repeat(number[low:high], np.maximum(counts, 0)),
            number[lists[first:end]],
            None if weights is None else np.asarray(weights[first:end]),
        )

    return parallel_map(part, range(0, graph.entries, _PART_ENTRIES))
