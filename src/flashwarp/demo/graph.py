"""Breadth-first search on a graph whose neighbour lists stay in a file.

The graph is the Kronecker graph of the GAP benchmark suite and Graph500 (RMAT with a, b, c = 0.57,
0.19, 0.19 and 16 edges a vertex), made symmetric and stored as CSR in two .npy files. The offsets
go to device memory; neighbours are read on demand, line by line, by the kernel in kernels/bfs.cuh.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp import graphs
from flashwarp.demo.check import check_equal
from flashwarp.demo.disk import direct_reads_work, drop_page_cache
from flashwarp.demo.kernels import data_path_of, launch
from flashwarp.demo.progress import Steps
from flashwarp.device import Device
from flashwarp.errors import ArgumentError
from flashwarp.graphs.reference import UNREACHED, reference_distances
from flashwarp.rows import ArrayStruct

__all__ = [
    "SIZES",
    "UNREACHED",
    "BreadthFirstSearch",
    "GraphResult",
    "GraphSize",
    "Level",
    "Search",
    "run",
]

_LINE_BYTES = 4096
# Vertices a warp takes at a time. On a GPU one for each lane; on the CPU enough that the lists of a
# tile, about 30 lines, keep the disk busy while a single thread expands them.
_TILE = {"cuda": 32, "cpu": 1024}


@dataclass(frozen=True)
class GraphSize:
    """How large the graph is: 2**scale vertices, about 30 neighbour entries each."""

    scale: int
    cache_bytes: int
    searches: int


# Scale 20 makes 126 MB of neighbours, four times the cache, in a few seconds of two cores.
SIZES = {
    "quick": GraphSize(20, 32 << 20, 2),
    "full": GraphSize(22, 128 << 20, 4),
}


@dataclass(frozen=True)
class Level:
    """One launch: the frontier at one distance, expanded."""

    frontier: int
    bytes_needed: int
    """Of the neighbour lists of the frontier."""
    bytes_read: int
    """From the file."""
    seconds: float


@dataclass(frozen=True)
class Search:
    """One search from one vertex, with a cache that starts empty."""

    source: int
    reached: int
    entries: int
    """Neighbour entries examined: those of every vertex reached."""
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
        """Bytes read from the file; more than the file when lines come in again."""
        return sum(level.bytes_read for level in self.levels)

    @property
    def hit_rate(self) -> float:
        """Share of the neighbours loaded that were in the cache, or came with one before them."""
        return 1 - self.bytes_read / _LINE_BYTES / self.entries


@dataclass(frozen=True)
class GraphResult:
    """All searches on one graph, and what doing it in memory costs."""

    scale: int
    vertices: int
    entries: int
    file_bytes: int
    cache_bytes: int
    build_seconds: float
    searches: tuple[Search, ...]
    load_seconds: float
    """Reading the whole neighbour file into memory, from a cold start."""
    reference_seconds: float
    """One search of scipy.sparse.csgraph on the graph in memory; the mean."""
    path: str


# The search on the device.


class _Params(ctypes.Structure):
    """Mirror of fw::kernels::bfs_params."""

    _fields_ = (
        ("neighbours", ArrayStruct),
        ("offsets", ctypes.c_uint64),
        ("distances", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
        ("vertices", ctypes.c_uint64),
        ("level", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
    )


class BreadthFirstSearch:
    """Breadth-first search from any vertex, neighbour lists on demand through an `Array`.

    Holds offsets and distances, 12 bytes a vertex, in device memory until closed. Use from one
    thread at a time.

    Parameters
    ----------
    neighbours : Array
        One dimension of 4-byte integers; stays the caller's.
    offsets : array of uint64
        vertices + 1 entries: the list of vertex v is neighbours[offsets[v]:offsets[v + 1]].

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib, flashwarp as fw
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "neighbours.npy"
    >>> np.save(path, np.array([1, 0, 2, 1], dtype=np.int32))
    >>> with fw.open(path, device="cpu") as neighbours:
    ...     with BreadthFirstSearch(neighbours, np.array([0, 1, 3, 4], dtype=np.uint64)) as search:
    ...         levels = list(search.levels(0))
    ...         search.distances().tolist()
    [0, 1, 2]
    """

    def __init__(self, neighbours: fw.Array, offsets: NDArray[np.uint64]) -> None:
        _check_graph(neighbours, offsets)
        self._neighbours = neighbours
        self._offsets = offsets
        self._vertices = len(offsets) - 1
        self._device = neighbours.device
        with ExitStack() as undo:
            self._offset_words = undo.enter_context(self._device.allocate(8 * len(offsets)))
            self._distances = undo.enter_context(self._device.allocate(4 * self._vertices))
            self._found = undo.enter_context(self._device.allocate(4))
            self._device.upload(self._offset_words.address, np.ascontiguousarray(offsets))
            self._owned = undo.pop_all()

    def levels(self, source: int) -> Iterator[Level]:
        """Search from `source`, one launch at each distance, and tell what it took.

        Blocks while a level runs. The search is over when the iterator ends.
        """
        if not 0 <= source < self._vertices:
            raise ArgumentError(f"source {source} is not one of {self._vertices} vertices")
        self._device.fill(self._distances.address, 0xFF, 4 * self._vertices)
        self._device.upload(self._distances.address + 4 * source, np.zeros(1, np.uint32))
        # A vertex is met at most once, so there are at most as many levels as vertices.
        for level in range(self._vertices):
            before, start = self._neighbours.stats.bytes_read, time.perf_counter()
            more = self._expand(level)
            seconds = time.perf_counter() - start
            frontier = np.flatnonzero(self.distances() == level)
            entries = self._offsets[frontier + 1] - self._offsets[frontier]
            yield Level(
                frontier=len(frontier),
                bytes_needed=4 * int(entries.sum()),
                bytes_read=self._neighbours.stats.bytes_read - before,
                seconds=seconds,
            )
            if not more:
                return

    def distances(self) -> NDArray[np.uint32]:
        """Return the distance of every vertex, `UNREACHED` where there is no path."""
        result = np.empty(self._vertices, dtype=np.uint32)
        self._device.download_into(self._distances.address, result)
        return result

    def _expand(self, level: int) -> bool:
        self._device.fill(self._found.address, 0, 4)
        tile = _TILE[self._device.kind]
        params = _Params(
            neighbours=self._neighbours.kernel_handle,
            offsets=self._offset_words.address,
            distances=self._distances.address,
            found=self._found.address,
            vertices=self._vertices,
            level=level,
            tile=tile,
        )
        launch("bfs_level", params, [self._neighbours], warps=-(-self._vertices // tile))
        return self._device.download(self._found.address, 4) != b"\0\0\0\0"

    def close(self) -> None:
        """Free the device memory. May be called twice."""
        self._owned.close()

    def __enter__(self) -> BreadthFirstSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_graph(neighbours: fw.Array, offsets: NDArray[np.uint64]) -> None:
    if neighbours.ndim != 1 or neighbours.dtype.kind not in "iu" or neighbours.dtype.itemsize != 4:
        raise ArgumentError(
            f"neighbours are one dimension of 4-byte integers, not {neighbours.ndim} of "
            f"{neighbours.dtype}"
        )
    if offsets.dtype != np.uint64 or offsets.ndim != 1 or len(offsets) < 2:
        raise ArgumentError("offsets are one dimension of uint64, one more than vertices")
    # The kernel trusts them.
    if offsets[0] != 0 or offsets[-1] != neighbours.shape[0] or (offsets[1:] < offsets[:-1]).any():
        raise ArgumentError(f"offsets do not rise from 0 to {neighbours.shape[0]}")


# The part as a whole.


def run(directory: Path, size: GraphSize, device: Device, steps: Steps) -> GraphResult:
    """Make the graph, search it on the device from its files, check against scipy."""
    start = time.perf_counter()
    with steps.step(f"graph: make a Kronecker graph of scale {size.scale}"):
        graph = graphs.load(f"kron:{size.scale}", directory / "graph")
    build_seconds = time.perf_counter() - start
    path, offsets = graph.neighbours_path, graph.offsets.view(np.uint64)
    sources = graph.pick_sources(size.searches, seed=2)
    drop_page_cache(path)
    searches, found, explained = [], [], ""
    for source in steps.track(sources, "graph: search from the file"):
        with (
            fw.open(
                path,
                device=device,
                cache=size.cache_bytes,
                line=_LINE_BYTES,
                o_direct=direct_reads_work(path),
            ) as array,
            BreadthFirstSearch(array, offsets) as search,
        ):
            levels = tuple(search.levels(source))
            found.append(search.distances())
            explained = data_path_of(array)
        searches.append(_search(source, levels, found[-1], offsets))
    drop_page_cache(path)
    start = time.perf_counter()
    graph.in_memory()
    load_seconds = time.perf_counter() - start
    matrix = graph.matrix()
    reference_seconds = 0.0
    for source, distances in zip(
        steps.track(sources, "graph: check with scipy"), found, strict=True
    ):
        start = time.perf_counter()
        expected = reference_distances(matrix, source)
        reference_seconds += time.perf_counter() - start
        check_equal(f"graph: distances from vertex {source}", distances, expected)
    return GraphResult(
        scale=size.scale,
        vertices=graph.vertices,
        entries=graph.entries,
        file_bytes=4 * graph.entries,
        cache_bytes=size.cache_bytes,
        build_seconds=build_seconds,
        searches=tuple(searches),
        load_seconds=load_seconds,
        reference_seconds=reference_seconds / len(sources),
        path=explained,
    )


def _search(
    source: int,
    levels: tuple[Level, ...],
    distances: NDArray[np.uint32],
    offsets: NDArray[np.uint64],
) -> Search:
    reached = distances != UNREACHED
    return Search(
        source=source,
        reached=int(reached.sum()),
        entries=int(np.diff(offsets)[reached].sum()),
        # Levels alone: the statistics between them are the demo's own work.
        seconds=sum(level.seconds for level in levels),
        levels=levels,
    )
