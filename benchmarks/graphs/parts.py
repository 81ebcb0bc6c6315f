"""The front end of the graph benchmarks, and their parts by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from benchmarks.base import Record, listed
from benchmarks.graphs import drives as graph_drives
from benchmarks.graphs import ways as graph_ways
from benchmarks.graphs.base import GraphBench, Options, Papers
from benchmarks.graphs.interface import interface
from benchmarks.graphs.solve import Algorithm
from flashwarp import graphs
from flashwarp.device import Device, resolve

__all__ = ["benchmark"]

_DEFAULT_PARTS = "memory,file,by_degree"

# A few cores cannot keep up with a drive.
_SLOWER = {"cuda": 1, "cpu": 50}
_GRAPHS = {
    "cuda": {"graph": "kron:24", "small": "kron:20", "uniform": "urand:22"},
    "cpu": {"graph": "kron:16", "small": "kron:12", "uniform": "urand:14"},
}
_ON_GRAPH = {
    "memory": graph_ways.memory,
    "file": graph_ways.file,
    "drives": graph_drives.drives,
    "kinds": graph_drives.kinds,
    "queue_pairs": graph_drives.queue_pairs,
    "cache_sizes": graph_ways.cache_sizes,
}
_PARTS = (*_ON_GRAPH, "by_degree", "reuse", "interface")
_Parts = Annotated[
    str, f"What to measure, with commas: {', '.join(_PARTS)}; spmv has only interface."
]


def benchmark(
    title: str,
    make: Callable[[Device, graphs.CsrGraph, int], Algorithm],
    papers: Papers,
    parts: str = _DEFAULT_PARTS,
) -> Callable[..., Record]:
    """Return the `run` of a benchmark.

    `make` takes the number of sources. An algorithm with other default `parts` has no kernels for
    the rest.
    """
    known = _PARTS if parts == _DEFAULT_PARTS else tuple(parts.split(","))

    def run(
        device: str | None,
        folder: Path,
        graph: Annotated[str, "kron:SCALE, urand:SCALE or a file; kron:24 on a GPU."] = "",
        small: Annotated[str, "The graph of `reuse`; kron:20 on a GPU."] = "",
        uniform: Annotated[str, "The other graph of `interface`; urand:22 on a GPU."] = "",
        parts: _Parts = parts,
        line: Annotated[str, "Line of the cache."] = "4 KiB",
        file_line: Annotated[str, "Line of the cache in front of the file."] = "64 KiB",
        share: Annotated[float, "Size of the cache in sizes of the lists."] = 0.5,
        sources: Annotated[int, "Searches of which the mean is taken."] = 2,
        slower: Annotated[float, "Divides the modelled drives' ceilings; 50 on the CPU."] = 0,
        runs: Annotated[int, "How often each way has its turn."] = 3,
    ) -> Record:
        wanted = listed("parts", parts, known)
        where = resolve(device)
        options = Options(
            line, file_line, share, slower or _SLOWER[where.kind], sources=sources, runs=runs
        )
        given = {"graph": graph, "small": small, "uniform": uniform}
        names = {name: what or _GRAPHS[where.kind][name] for name, what in given.items()}
        report = Record(
            title=title,
            device=where.describe(),
            settings={**names, "parts": parts, **asdict(options)},
            seeds={"graph": 1, "sources": 1, "drives": 1, "values": 1},
        )
        bench = GraphBench(
            where, report, lambda device, graph: make(device, graph, sources), papers, options
        )
        _measure(bench, names, wanted, folder)
        return report

    return run


def _measure(bench: GraphBench, names: dict[str, str], parts: list[str], folder: Path) -> None:
    @functools.cache
    def made(name: str) -> graphs.CsrGraph:
        return graphs.load(names[name], folder / name)

    for part in parts:
        if part == "reuse":
            graph_ways.reuse(bench, made("small"))
        elif part == "by_degree":
            _ordered(bench, made("graph"), folder / "by_degree")
        elif part == "interface":
            for name in ("graph", "uniform"):
                interface(bench, made(name), names[name])
        else:
            _ON_GRAPH[part](bench, made("graph"))


def _ordered(bench: GraphBench, graph: graphs.CsrGraph, folder: Path) -> None:
    """The same graph with its vertices numbered by falling degree."""
    ordered = graphs.load(graph.folder, folder, by_degree=True)
    graph_ways.memory(bench, ordered, "by degree, ")
    graph_ways.file(bench, ordered, "by degree, ")
