"""Breadth-first search on a graph whose neighbour lists stay in a file.

The graph is the Kronecker graph of the GAP benchmark suite and Graph500 (RMAT with a, b, c = 0.57,
0.19, 0.19 and 16 edges a vertex), made symmetric and stored as CSR in two .npy files. Its vertices
are numbered by falling degree, as `flashwarp graph make --by-degree` does it: the lists that
several levels visit then lie together, and stay in the cache. The offsets go to device memory;
neighbours are read on demand, line by line, by the search in graph.cuh.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.graphs.reference import UNREACHED, reference_distances
from demo.check import check_equal
from demo.progress import Steps
from flashwarp import graphs
from flashwarp.device import Device
from flashwarp.policy import CLOCK, Policy
from flashwarp.probe.disk import direct_reads_work, drop_page_cache

__all__ = [
    "SIZES",
    "UNREACHED",
    "BreadthFirstSearch",
    "GraphResult",
    "GraphSize",
    "Level",
    "Search",
    "compile_search",
    "run",
]

_LINE_BYTES = 4096


@dataclass(frozen=True)
class GraphSize:
    """How large the graph is: 2**scale vertices, about 30 neighbour entries each."""

    scale: int
    cache_bytes: int
    searches: int


# The cache holds two thirds of the neighbours. Two levels of a search visit nearly every list, so
# with a small cache the second one reads again what the first one read.
SIZES = {
    "quick": GraphSize(20, 80 << 20, 2),
    "full": GraphSize(23, 680 << 20, 4),
}


@dataclass(frozen=True)
class Level:
    """One launch: the frontier at one distance, expanded."""

    frontier: int
    bytes_needed: int  # of the neighbour lists of the frontier
    bytes_read: int  # from the file
    seconds: float


@dataclass(frozen=True)
class Search:
    """One search from one vertex, with a cache that starts empty."""

    source: int
    reached: int
    entries: int  # neighbour entries examined: those of every vertex reached
    seconds: float
    levels: tuple[Level, ...]

    @property
    def teps(self) -> float:
        """Undirected edges traversed a second, as Graph500 counts them: each edge once."""
        return self.entries / 2 / self.seconds

    @property
    def bytes_needed(self) -> int:
        """Bytes of all neighbour entries examined."""
        return sum(level.bytes_needed for level in self.levels)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the file; more than the file holds if lines are read again."""
        return sum(level.bytes_read for level in self.levels)


@dataclass(frozen=True)
class GraphResult:
    """All searches on one graph, and what a search in memory costs."""

    scale: int
    vertices: int
    entries: int
    file_bytes: int
    cache_bytes: int
    build_seconds: float
    searches: tuple[Search, ...]
    reference_seconds: float  # one search of scipy.sparse.csgraph on the graph in memory; the mean


# The search on the device.


_KERNEL = """
#include "flashwarp/graph.cuh"

FW_KERNEL_RESIDENT(4) search_level(const FW_GRID_CONSTANT fw::array<const uint32_t> neighbours,
                                   const FW_GRID_CONSTANT fw::graph::rows rows,
                                   uint32_t* distances, uint32_t* found, uint32_t level) {
  fw::graph::cached lists(neighbours);
  fw::graph::search(rows, lists, {distances, found, rows.vertices, level});
}
"""


def compile_search(device: Device, policy: Policy = CLOCK) -> fw.program.Kernel:
    """Compile the search for a device, or find it compiled. Blocks."""
    return fw.compile(_KERNEL, device, policy=policy)["search_level"]


class BreadthFirstSearch:
    """Breadth-first search from any vertex, neighbour lists on demand through an `Array`.

    Holds offsets and distances, 12 bytes a vertex, in device memory until closed. Use from one
    thread at a time. Blocks while its kernel is compiled, the first time.

    Examples
    --------
    >>> import tempfile
    >>> from flashwarp import graphs
    >>> graph = graphs.load("kron:6", tempfile.mkdtemp())
    >>> source = graph.pick_sources(1, seed=1)[0]
    >>> with graph.neighbours(device="cpu") as neighbours:
    ...     with BreadthFirstSearch(graph, neighbours) as search:
    ...         levels = list(search.levels(source))
    ...         int(search.distances()[source])
    0
    """

    def __init__(self, graph: graphs.CsrGraph, neighbours: fw.Array) -> None:
        self._graph = graph
        self._neighbours = neighbours
        self._device = neighbours.device
        self._kernel = compile_search(self._device, neighbours.cache.policy)
        with ExitStack() as undo:
            self._rows = undo.enter_context(graphs.Rows(graph, neighbours))
            self._distances = undo.enter_context(self._device.allocate(4 * graph.vertices))
            self._found = undo.enter_context(self._device.allocate(4))
            self._owned = undo.pop_all()

    def levels(self, source: int) -> Iterator[Level]:
        """Search from `source`: one launch for each distance, each yielded with its costs.

        Blocks while a level runs. The search is over when the iterator ends.
        """
        start_at = self._distances.address + 4 * self._graph.vertex_of(source)
        self._device.fill(self._distances.address, 0xFF, 4 * self._graph.vertices)
        self._device.upload(start_at, np.zeros(1, np.uint32))
        degrees = self._graph.by_label(self._graph.degrees)
        # Each level reaches at least one vertex, and none twice, so there are at most this many.
        for level in range(self._graph.vertices):
            before, start = self._neighbours.stats.bytes_read, time.perf_counter()
            more = self._expand(level)
            seconds = time.perf_counter() - start
            frontier = np.flatnonzero(self.distances() == level)
            yield Level(
                frontier=len(frontier),
                bytes_needed=4 * int(degrees[frontier].sum()),
                bytes_read=self._neighbours.stats.bytes_read - before,
                seconds=seconds,
            )
            if not more:
                return

    def distances(self) -> NDArray[np.uint32]:
        """Return the distance of every vertex, `UNREACHED` where there is no path."""
        result = np.empty(self._graph.vertices, dtype=np.uint32)
        self._device.download_into(self._distances.address, result)
        return self._graph.by_label(result)

    def _expand(self, level: int) -> bool:
        self._device.fill(self._found.address, 0, 4)
        rows = self._rows
        self._kernel(
            self._neighbours, rows.handle, self._distances, self._found, level, warps=rows.chunks
        )
        self._neighbours.wait()
        rows.turn()
        return self._device.download(self._found.address, 4) != b"\0\0\0\0"

    def close(self) -> None:
        """Free the device memory. May be called twice."""
        self._owned.close()

    def __enter__(self) -> BreadthFirstSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The part as a whole.


def run(directory: Path, size: GraphSize, device: Device, steps: Steps) -> GraphResult:
    """Make the graph, search it on the device from its files, check against scipy."""
    start = time.perf_counter()
    with steps.step(f"graph: make a Kronecker graph of scale {size.scale}"):
        graph = graphs.load(f"kron:{size.scale}", directory / "graph", by_degree=True)
    build_seconds = time.perf_counter() - start
    warm_up, *sources = graph.pick_sources(1 + size.searches, seed=2)
    with steps.step("graph: search from the file"):
        _search_from_file(graph, warm_up, size, device)
        done = [_search_from_file(graph, source, size, device) for source in sources]
    with steps.step("graph: check with scipy"):
        matrix, reference_seconds = graph.matrix(), 0.0
        for search, distances in done:
            start = time.perf_counter()
            expected = reference_distances(matrix, search.source)
            reference_seconds += time.perf_counter() - start
            check_equal(f"graph: distances from vertex {search.source}", distances, expected)
    return GraphResult(
        scale=size.scale,
        vertices=graph.vertices,
        entries=graph.entries,
        file_bytes=4 * graph.entries,
        cache_bytes=size.cache_bytes,
        build_seconds=build_seconds,
        searches=tuple(search for search, _ in done),
        reference_seconds=reference_seconds / len(sources),
    )


def _search_from_file(
    graph: graphs.CsrGraph, source: int, size: GraphSize, device: Device
) -> tuple[Search, NDArray[np.uint32]]:
    """Search once, with a cache that starts empty, of a file that is on the disk only."""
    path = graph.neighbours_path
    drop_page_cache(path)
    with (
        fw.open(
            path,
            device=device,
            cache=size.cache_bytes,
            line=_LINE_BYTES,
            o_direct=direct_reads_work(path),
        ) as array,
        BreadthFirstSearch(graph, array) as search,
    ):
        levels = tuple(search.levels(source))
        distances = search.distances()
    return _search(graph, source, levels, distances), distances


def _search(
    graph: graphs.CsrGraph, source: int, levels: tuple[Level, ...], distances: NDArray[np.uint32]
) -> Search:
    reached = distances != UNREACHED
    return Search(
        source=source,
        reached=int(reached.sum()),
        entries=int(graph.by_label(graph.degrees)[reached].sum()),
        # Levels alone: the statistics between them are the demo's own work.
        seconds=sum(level.seconds for level in levels),
        levels=levels,
    )
