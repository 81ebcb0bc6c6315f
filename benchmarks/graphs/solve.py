"""Algorithms on graphs for the benchmarks, and one reader for every way to reach the lists.

An algorithm keeps its answer on the device and can judge it. A `Reader` runs it over one array, or
over memory that the device reads in place, by the kernels of `graph_kernels.cu`.
"""

# The methods of an algorithm are documented in `Algorithm`.
# ruff: noqa: D102
from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.graphs.reference import UNREACHED, check_components, check_distances
from flashwarp import graphs
from flashwarp.device import Device
from flashwarp.graphs.rows import RowsStruct
from flashwarp.program.compiling import Program

__all__ = ["KERNELS", "Algorithm", "Components", "Product", "Reader", "Search"]

KERNELS = Path(__file__).with_name("kernels.cu")

# The other ways give each warp a chunk of the lists.
_THREADS_A_VERTEX = {"by_warp": 32, "naive": 1, "uncached": 1}

# Shares of the vertices after whose lists trees of components are flattened. On Kronecker graphs
# the first share has joined nearly all vertices that have neighbours.
_STAGES = (0, 1 / 64, 1 / 16, 1 / 4, 1)

Launch = Callable[[str, ctypes.Structure], None]


class _Input(ctypes.Structure):
    """Mirror of `bench::input`."""

    _fields_ = (
        ("rows", RowsStruct),
        ("entries", ctypes.c_uint64),
        ("fill_from", ctypes.c_uint64),
    )


class _Level(ctypes.Structure):
    """Mirror of `fw::graph::search_level`."""

    _fields_ = (
        ("distances", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
        ("vertices", ctypes.c_uint64),
        ("level", ctypes.c_uint64),
    )


class _Linking(ctypes.Structure):
    """Mirror of `bench::linking`."""

    _fields_ = (
        ("parents", ctypes.c_uint64),
        ("vertices", ctypes.c_uint64),
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
    )


class _Multiplying(ctypes.Structure):
    """Mirror of `bench::product`."""

    _fields_ = (
        ("values", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
    )


class Algorithm(ABC):
    """One algorithm on one graph; its answer stays on the device until the next `solve`."""

    name: str
    entries: int
    """Entries that one `solve` reads."""
    returns = True
    """Whether a round reads what the round before left in the cache."""
    values: NDArray[np.float32] | None = None
    """One for each entry, where the kernels read them beside the lists."""

    @abstractmethod
    def solve(self, launch: Launch, program: Program, begin: Callable[[], None]) -> float:
        """Find the answer with the kernels that `launch` chooses; return the seconds it took.

        What `begin` takes, which is called before each of several rounds, does not count.
        """

    @abstractmethod
    def right(self) -> bool:
        """Tell whether the last answer is right."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds on the device."""


class Search(Algorithm):
    """Breadth-first search from several sources, one after the other; all is by label."""

    name = "bfs"

    def __init__(self, device: Device, graph: graphs.CsrGraph, sources: Sequence[int]) -> None:
        self._device = device
        self._graph = graph
        self._sources = sources
        self._distances = device.allocate(4 * graph.vertices)
        self._found = device.allocate(4)
        self.answers: list[NDArray[np.uint32]] = []
        self._right: dict[int, NDArray[np.uint32]] = {}
        self.entries = 0

    def solve(
        self,
        launch: Launch,
        program: Program,  # noqa: ARG002 (see Algorithm)
        begin: Callable[[], None],
    ) -> float:
        seconds, self.answers = 0.0, []
        for source in self._sources:
            begin()
            self._device.fill(self._distances.address, 0xFF, 4 * self._graph.vertices)
            at = self._distances.address + 4 * self._graph.vertex_of(source)
            self._device.upload(at, np.zeros(1, np.uint32))
            start = time.perf_counter()
            self._search(launch)
            seconds += time.perf_counter() - start
            self.answers.append(self._download())
        degrees = self._graph.by_label(self._graph.degrees)
        self.entries = sum(int(degrees[answer != UNREACHED].sum()) for answer in self.answers)
        return seconds

    def _search(self, launch: Launch) -> None:
        # A vertex is met at most once, so there are at most as many levels as vertices.
        for level in range(self._graph.vertices):
            self._device.fill(self._found.address, 0, 4)
            state = _Level(
                distances=self._distances.address,
                found=self._found.address,
                vertices=self._graph.vertices,
                level=level,
            )
            launch("bfs", state)
            if self._device.download(self._found.address, 4) == b"\0\0\0\0":
                return

    def _download(self) -> NDArray[np.uint32]:
        answer = np.empty(self._graph.vertices, np.uint32)
        self._device.download_into(self._distances.address, answer)
        return self._graph.by_label(answer)

    def right(self) -> bool:
        return all(
            self._is_right(source, answer)
            for source, answer in zip(self._sources, self.answers, strict=True)
        )

    def _is_right(self, source: int, answer: NDArray[np.uint32]) -> bool:
        """There is one right answer: what equals one that passed the check needs none."""
        if source in self._right and np.array_equal(answer, self._right[source]):
            return True
        if not check_distances(self._graph, source, answer):
            return False
        self._right[source] = answer
        return True

    def close(self) -> None:
        self._found.close()
        self._distances.close()


class Components(Algorithm):
    """Connected components: trees joined edge by edge, in launches that read each list once."""

    name = "cc"
    returns = False

    def __init__(self, device: Device, graph: graphs.CsrGraph) -> None:
        self._device = device
        self._graph = graph
        self._parents = device.allocate(4 * graph.vertices)
        self._right: NDArray[np.uint32] | None = None
        self.entries = graph.entries

    def solve(self, launch: Launch, program: Program, begin: Callable[[], None]) -> float:
        vertices = self._graph.vertices
        begin()
        self._device.wait()
        start = time.perf_counter()
        program["cc_begin"](self._parents, vertices, warps=-(-vertices // 32))
        for first, end in pairwise(int(vertices * share) for share in _STAGES):
            part = _Linking(parents=self._parents.address, vertices=vertices, begin=first, end=end)
            launch("cc", part)
            program["cc_compress"](self._parents, vertices, warps=-(-vertices // 32))
        self._device.wait()
        return time.perf_counter() - start

    def labels(self) -> NDArray[np.uint32]:
        """Return the smallest label of the component of each label."""
        roots = np.empty(self._graph.vertices, np.uint32)
        self._device.download_into(self._parents.address, roots)
        return self._graph.smallest_labels(roots)

    def right(self) -> bool:
        labels = self.labels()
        # As in a search, what equals a right answer is right.
        if self._right is None or not np.array_equal(labels, self._right):
            if not check_components(self._graph, labels):
                return False
            self._right = labels
        return True

    def close(self) -> None:
        self._parents.close()


class Product(Algorithm):
    """The product of a sparse matrix, whose entries have values made at random, with a vector.

    All numbers are small and whole, so sums are exact in whatever order they are made.
    """

    name = "spmv"

    def __init__(self, device: Device, graph: graphs.CsrGraph) -> None:
        from scipy.sparse import csr_matrix

        random = np.random.default_rng(1)
        values = random.integers(1, 4, graph.entries).astype(np.float32)
        x = random.integers(1, 3, graph.vertices).astype(np.float32)
        matrix = csr_matrix((values, graph.in_memory(), graph.offsets), (len(x), len(x)))
        self._expected = matrix @ x
        self.values, self.entries = values, graph.entries
        self._device = device
        self._vertices = graph.vertices
        self._plain_values = device.allocate(values.nbytes)
        device.upload(self._plain_values.address, values)
        self._x = device.allocate(x.nbytes)
        device.upload(self._x.address, x)
        self._y = device.allocate(x.nbytes)

    def solve(
        self,
        launch: Launch,
        program: Program,  # noqa: ARG002 (see Algorithm)
        begin: Callable[[], None],
    ) -> float:
        begin()
        self._device.fill(self._y.address, 0, self._y.nbytes)
        self._device.wait()
        given = _Multiplying(
            values=self._plain_values.address,
            x=self._x.address,
            y=self._y.address,
            columns=self._vertices,
        )
        start = time.perf_counter()
        launch("spmv", given)
        return time.perf_counter() - start

    def right(self) -> bool:
        y = np.empty(self._vertices, np.float32)
        self._device.download_into(self._y.address, y)
        return bool((y == self._expected).all())

    def close(self) -> None:
        self._y.close()
        self._x.close()
        self._plain_values.close()


class Reader:
    """The lists of a graph through one array, or in place at an address.

    `values`, for algorithms that have them, lie in an array of their own on the same cache.
    """

    def __init__(
        self,
        program: Program,
        graph: graphs.CsrGraph,
        array: fw.Array,
        in_place: int = 0,
        ahead: int | None = None,
        values: fw.Array | None = None,
    ) -> None:
        self.arrays = [array] if values is None else [array, values]
        self._program = program
        self._graph = graph
        self.bytes_read = 0
        """By the cache, in the last `solve`."""
        self._in_place = in_place
        self._rows = graphs.Rows(graph, array, ahead)

    def solve(
        self,
        algorithm: Algorithm,
        way: str,
        *,
        cold: bool = True,
        each: bool = False,
        weigh: bool = False,
        fill_from: int = 0,
    ) -> float:
        """Run in one way; return seconds.

        `cold`: with nothing in the cache at the start; `each`: of each round of the algorithm.
        `weigh`: turn only after passes that read much, else after each.
        """
        if cold:
            self._drop()
        rows = self._rows.handle
        rows.backwards = 0
        lanes = _THREADS_A_VERTEX.get(way)
        items = self._rows.chunks if lanes is None else -(-self._graph.vertices * lanes // 32)

        def launch(kernel: str, state: ctypes.Structure) -> None:
            given = _Input(rows=rows, entries=self._in_place, fill_from=fill_from)
            self._program[f"{kernel}_{way}"](*self.arrays, given, state, warps=items)
            for array in self.arrays:
                array.wait()
            if not algorithm.returns:
                return
            if weigh:
                self._rows.turn()
            else:
                rows.backwards ^= 1

        before = self._read()
        seconds = algorithm.solve(launch, self._program, self._drop if each else lambda: None)
        self.bytes_read = self._read() - before
        return seconds

    def _read(self) -> int:
        return sum(array.stats.bytes_read for array in self.arrays)

    def _drop(self) -> None:
        for array in self.arrays:
            array.drop_cache()

    def close(self) -> None:
        self._rows.close()
