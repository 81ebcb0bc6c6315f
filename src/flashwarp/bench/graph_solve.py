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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp import graphs
from flashwarp.compiling import Program
from flashwarp.device import Device
from flashwarp.graphs.reference import UNREACHED, check_components, check_distances
from flashwarp.graphs.rows import RowsStruct

__all__ = ["KERNELS", "Algorithm", "Components", "Reader", "Search"]

KERNELS = Path(__file__).with_name("graph_kernels.cu")

# Ways that give every warp a chunk of the lists, or every warp or thread a vertex.
_BY_CHUNK = ("cached", "in_place", "plain")
_THREADS_A_VERTEX = {"by_warp": 32, "naive": 1, "uncached": 1}

Launch = Callable[[str, ctypes.Structure], None]


class _Input(ctypes.Structure):
    """Mirror of `bench::input`."""

    _fields_ = (
        ("rows", RowsStruct),
        ("entries", ctypes.c_uint64),
        ("fill_from", ctypes.c_uint64),
    )


class _Level(ctypes.Structure):
    """Mirror of `bench::level_of_search`."""

    _fields_ = (
        ("distances", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
        ("vertices", ctypes.c_uint64),
        ("level", ctypes.c_uint64),
    )


class _Linking(ctypes.Structure):
    """Mirror of `bench::linking`."""

    _fields_ = (("parents", ctypes.c_uint64), ("vertices", ctypes.c_uint64))


class Algorithm(ABC):
    """One algorithm on one graph; its answer stays on the device until the next `solve`."""

    name: str
    entries: int
    """Entries that one `solve` looks at."""

    @abstractmethod
    def solve(self, launch: Launch, program: Program) -> float:
        """Find the answer with the kernels that `launch` chooses; return the seconds it took."""

    @abstractmethod
    def right(self) -> bool:
        """Tell whether the last answer is right."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds on the device."""


class Search(Algorithm):
    """Breadth-first search from several sources, one after the other."""

    name = "bfs"

    def __init__(self, device: Device, graph: graphs.CsrGraph, sources: Sequence[int]) -> None:
        self._device = device
        self._graph = graph
        self._sources = sources
        self._distances = device.allocate(4 * graph.vertices)
        self._found = device.allocate(4)
        self.answers: list[NDArray[np.uint32]] = []
        self.entries = 0

    def solve(self, launch: Launch, program: Program) -> float:  # noqa: ARG002 (see Algorithm)
        seconds, self.answers = 0.0, []
        for source in self._sources:
            self._device.fill(self._distances.address, 0xFF, 4 * self._graph.vertices)
            self._device.upload(self._distances.address + 4 * source, np.zeros(1, np.uint32))
            start = time.perf_counter()
            self._search(launch)
            seconds += time.perf_counter() - start
            self.answers.append(self._download())
        reached = (answer != UNREACHED for answer in self.answers)
        self.entries = sum(int(self._graph.degrees[one].sum()) for one in reached)
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
        return answer

    def right(self) -> bool:
        return all(
            check_distances(self._graph, source, answer)
            for source, answer in zip(self._sources, self.answers, strict=True)
        )

    def close(self) -> None:
        self._found.close()
        self._distances.close()


class Components(Algorithm):
    """Connected components: trees joined edge by edge, in one pass over the lists."""

    name = "cc"

    def __init__(self, device: Device, graph: graphs.CsrGraph) -> None:
        self._device = device
        self._graph = graph
        self._parents = device.allocate(4 * graph.vertices)
        self.entries = graph.entries

    def solve(self, launch: Launch, program: Program) -> float:
        vertices = self._graph.vertices
        self._device.synchronize()
        start = time.perf_counter()
        program["cc_begin"](self._parents, vertices, warps=-(-vertices // 32))
        launch("cc", _Linking(parents=self._parents.address, vertices=vertices))
        program["cc_compress"](self._parents, vertices, warps=-(-vertices // 32))
        self._device.synchronize()
        return time.perf_counter() - start

    def labels(self) -> NDArray[np.uint32]:
        """Return the smallest vertex of the component of each vertex."""
        labels = np.empty(self._graph.vertices, np.uint32)
        self._device.download_into(self._parents.address, labels)
        return labels

    def right(self) -> bool:
        return check_components(self._graph, self.labels())

    def close(self) -> None:
        self._parents.close()


class Reader:
    """The lists of a graph through one array, or in place at an address."""

    def __init__(
        self,
        program: Program,
        graph: graphs.CsrGraph,
        array: fw.Array,
        in_place: int = 0,
        ahead: int | None = None,
    ) -> None:
        self.array = array
        self._program = program
        self._graph = graph
        self._in_place = in_place
        self._rows = graphs.Rows(graph, array, ahead)

    def solve(
        self, algorithm: Algorithm, way: str, *, cold: bool = True, fill_from: int = 0
    ) -> float:
        """Run in one way; return seconds. `cold`: with nothing in the cache at the start."""
        if cold:
            self.array.drop_cache()
        given = _Input(rows=self._rows.handle, entries=self._in_place, fill_from=fill_from)
        given.rows.backwards = 0
        lanes = _THREADS_A_VERTEX.get(way)
        items = self._rows.chunks if lanes is None else -(-self._graph.vertices * lanes // 32)

        def launch(kernel: str, state: ctypes.Structure) -> None:
            self._program[f"{kernel}_{way}"](self.array, given, state, warps=items)
            self.array.synchronize()
            given.rows.backwards ^= 1

        return algorithm.solve(launch, self._program)

    def close(self) -> None:
        self._rows.close()
