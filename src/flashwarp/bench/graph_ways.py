"""Breadth-first search and connected components over every way to read the lists of a graph.

What `bench/bfs.py` and `bench/cc.py` share: BaM's section 5.2. The lists lie in pinned host memory
or in a file; ours stand beside the same kernel reading the memory in place, beside a warp a vertex
as EMOGI reads it, and, for a file, beside the disk. Every result is checked.
"""

# The methods of an algorithm are documented in `Algorithm`.
# ruff: noqa: D102
from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp import graphs
from flashwarp.bench.report import Report, Row, machine_facts
from flashwarp.bench.timing import in_turns
from flashwarp.compiling import Program
from flashwarp.demo.disk import direct_reads_work, drop_page_cache, measure_ceiling
from flashwarp.device import Device, resolve
from flashwarp.graphs.reference import UNREACHED, check_components, check_distances
from flashwarp.graphs.rows import RowsStruct

__all__ = ["KERNELS", "PARTS", "Algorithm", "Components", "Papers", "Reader", "Search", "run"]

KERNELS = Path(__file__).with_name("graph_kernels.cu")

PARTS = "memory,file,figure8,figure10"

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


@dataclass(frozen=True)
class Papers:
    """What BaM measured, to stand beside ours."""

    cached_over_none: str
    reuse_over_naive: str


@dataclass
class _Bench:
    device: Device
    folder: Path
    report: Report
    algorithm: Callable[[graphs.CsrGraph], Algorithm]
    papers: Papers
    line: str
    share: float
    runs: int

    def __post_init__(self) -> None:
        self.program = fw.compile(KERNELS, self.device)

    def _turns(
        self, algorithm: Algorithm, ways: Mapping[str, Callable[[], float]]
    ) -> tuple[dict[str, float], dict[str, bool]]:
        """Rates of all ways, in billions of entries a second, and whether each was right."""
        right: dict[str, bool] = {}

        def measured(name: str, way: Callable[[], float]) -> float:
            seconds = way()
            if name not in right:
                right[name] = algorithm.right()
            return seconds

        seconds = in_turns(
            {name: partial(measured, name, way) for name, way in ways.items()}, self.runs
        )
        return {name: algorithm.entries / taken / 1e9 for name, taken in seconds.items()}, right

    def memory(self, graph: graphs.CsrGraph) -> None:
        """Lists in pinned host memory, read on demand and in place."""
        held = graph.in_memory()
        with ExitStack() as stack:
            storage = fw.storage.Memory(held)
            array = stack.enter_context(self._open_memory(storage, held.nbytes * self.share))
            pinned = self._reader(stack, graph, array, held.ctypes.data)
            copy = stack.enter_context(self.device.allocate(held.nbytes))
            self.device.upload(copy.address, held)
            inside = self._reader(stack, graph, array, copy.address)
            # Memory of its own: a GPU pins each page once.
            again = fw.storage.Memory(held.copy())
            whole = stack.enter_context(self._open_memory(again, held.nbytes * 1.05))
            resident = self._reader(stack, graph, whole)
            algorithm = self._algorithm(stack, graph)
            line = array.cache.line_bytes // 4
            solve = partial(pinned.solve, algorithm)
            speed, right = self._turns(
                algorithm,
                {
                    "zero-copy, a warp a vertex (EMOGI)": partial(solve, "by_warp"),
                    "zero-copy, chunks": partial(solve, "plain"),
                    "cached": partial(solve, "cached"),
                    "cached, short lists in place": partial(solve, "in_place", fill_from=line // 8),
                    "cached, half a line in place": partial(solve, "in_place", fill_from=line // 2),
                    "device memory": partial(inside.solve, algorithm, "plain"),
                    "resident": partial(resident.solve, algorithm, "cached", cold=False),
                },
            )
        base = "zero-copy, a warp a vertex (EMOGI)"
        for name, rate in speed.items():
            against = "device memory" if name == "resident" else base
            ours = name.startswith("cached")
            self._add(
                f"pinned memory: {name}",
                rate,
                right[name],
                against if name not in (base, "device memory") else "",
                speed[against],
                target=1.0 if ours else 0.0,
            )

    def file(self, graph: graphs.CsrGraph, line: str) -> None:
        """Lists in a file that is read past the page cache, with a cache for part and for all."""
        for share in (self.share, 1.05):
            self._file(graph, line, share)

    def _file(self, graph: graphs.CsrGraph, line: str, share: float) -> None:
        path = graph.neighbours_path
        drop_page_cache(path)
        with ExitStack() as stack:
            array = stack.enter_context(
                graph.neighbours(
                    device=self.device,
                    cache=self._cache_bytes(4 * graph.entries * share),
                    line=line,
                    direct=direct_reads_work(path),
                )
            )
            reader = self._reader(stack, graph, array)
            algorithm = self._algorithm(stack, graph)
            ceiling = measure_ceiling(path, array.cache.line_bytes)
            before = array.stats.bytes_read
            seconds = reader.solve(algorithm, "cached")
            read = array.stats.bytes_read - before
            right = algorithm.right()
        name = f"file, cache of {share:g} of the lists"
        disk = (f"disk itself, random reads of {line}", ceiling.random_gb_per_s)
        needed = 4 * algorithm.entries
        self.report.add(
            Row(
                f"{name}: bytes needed",
                needed / seconds / 1e9,
                "GB/s",
                *disk,
                0.9,
                right,
                note=f"read {read / needed:.2f} bytes for each byte needed",
            )
        )
        self.report.add(Row(f"{name}: bytes read", read / seconds / 1e9, "GB/s", *disk))

    def figure8(self, graph: graphs.CsrGraph) -> None:
        """No cache, a naive one, coalescing and reuse."""
        held = graph.in_memory()
        with ExitStack() as stack:
            storage = fw.storage.Memory(held)
            array = stack.enter_context(self._open_memory(storage, held.nbytes * self.share))
            reader = self._reader(stack, graph, array)
            algorithm = self._algorithm(stack, graph)
            solve = partial(reader.solve, algorithm)
            speed, right = self._turns(
                algorithm, {way: partial(solve, way) for way in ("uncached", "naive", "cached")}
            )
        place = "figure 8"
        self._add(f"{place}: a command for each entry", speed["uncached"], right["uncached"])
        self._add(
            f"{place}: naive cache",
            speed["naive"],
            right["naive"],
            "a command for each entry",
            speed["uncached"],
            paper=self.papers.cached_over_none,
        )
        self._add(
            f"{place}: coalescing and reuse",
            speed["cached"],
            right["cached"],
            "naive cache",
            speed["naive"],
            paper=self.papers.reuse_over_naive,
        )

    def figure10(self, graph: graphs.CsrGraph) -> None:
        """Caches of several sizes, in pinned host memory."""
        held = graph.in_memory()
        storage = fw.storage.Memory(held)
        shares = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.05)
        rates: dict[float, float] = {}
        rights: dict[float, bool] = {}
        for share in shares:
            with ExitStack() as stack:
                array = stack.enter_context(self._open_memory(storage, held.nbytes * share))
                reader = self._reader(stack, graph, array)
                algorithm = self._algorithm(stack, graph)
                speed, right = self._turns(
                    algorithm, {"cached": partial(reader.solve, algorithm, "cached")}
                )
                rates[share], rights[share] = speed["cached"], right["cached"]
        for share in shares:
            self._add(
                f"figure 10: cache of {share:.3g} of the lists",
                rates[share],
                rights[share],
                "cache of 0.25",
                rates[1 / 4],
                paper="1.0 from 1 GB to 8 GB of 32 GB (BaM Fig. 10)" if share < 0.25 else "",
            )

    def _add(
        self,
        name: str,
        rate: float,
        right: bool,
        against: str = "",
        reference: float = 0.0,
        target: float = 0.0,
        paper: str = "",
    ) -> None:
        if not against:
            reference = 0.0
        self.report.add(
            Row(name, rate, "G entries/s", against, reference, target, right, paper=paper)
        )

    def _algorithm(self, stack: ExitStack, graph: graphs.CsrGraph) -> Algorithm:
        algorithm = self.algorithm(graph)
        stack.callback(algorithm.close)
        return algorithm

    def _reader(
        self, stack: ExitStack, graph: graphs.CsrGraph, array: fw.Array, in_place: int = 0
    ) -> Reader:
        reader = Reader(self.program, graph, array, in_place)
        stack.callback(reader.close)
        return reader

    def _open_memory(self, storage: Any, cache_bytes: float) -> fw.Array:
        cache = self._cache_bytes(cache_bytes)
        return fw.from_storage(storage, "uint32", device=self.device, cache=cache, line=self.line)

    def _cache_bytes(self, wanted: float) -> int:
        return max(int(wanted), 1 << 20)


def run(
    device: str | None,
    folder: Path,
    title: str,
    algorithm: Callable[[Device, graphs.CsrGraph], Algorithm],
    papers: Papers,
    graph: str,
    small: str,
    parts: str,
    line: str,
    file_line: str,
    share: float,
    runs: int,
) -> Report:
    """Measure the parts that are named."""
    where = resolve(device)
    on_gpu = where.kind == "cuda"
    names = {
        "graph": graph or ("kron:24" if on_gpu else "kron:16"),
        "small": small or ("kron:20" if on_gpu else "kron:12"),
    }
    report = Report(
        title=title,
        settings={**names, "line": line, "file_line": file_line, "cache_share": share},
        machine=machine_facts(where.describe()),
    )
    bench = _Bench(where, folder, report, partial(algorithm, where), papers, line, share, runs)
    made = {name: graphs.load(what, folder / name) for name, what in names.items()}
    wanted = parts.split(",")
    if unknown := set(wanted) - set(PARTS.split(",")):
        raise fw.errors.ArgumentError(f"parts are {PARTS}, not {', '.join(sorted(unknown))}")
    if "memory" in wanted:
        bench.memory(made["graph"])
    if "file" in wanted:
        bench.file(made["graph"], file_line)
    if "figure8" in wanted:
        bench.figure8(made["small"])
    if "figure10" in wanted:
        bench.figure10(made["graph"])
    return report
