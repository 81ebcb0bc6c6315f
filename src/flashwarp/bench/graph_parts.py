"""The parts of the graph benchmarks, by name: what `bench/bfs.py` and `bench/cc.py` call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from flashwarp.apps import graphs
from flashwarp.bench import graph_drives, graph_ways
from flashwarp.bench.graph_bench import GraphBench, Options, Papers
from flashwarp.bench.graph_interface import interface
from flashwarp.bench.graph_solve import Algorithm
from flashwarp.device import Device, resolve
from flashwarp.errors import ArgumentError
from flashwarp.probe.report import Report, machine_facts

__all__ = ["PARTS", "run"]

PARTS = "memory,file,by_degree,figure7,figure8,figure9,figure10,figure11,interface"

# A few cores are no match for one drive.
_SLOWER = {"cuda": 1, "cpu": 50}
_GRAPHS = {
    "cuda": {"graph": "kron:24", "small": "kron:20", "uniform": "urand:22"},
    "cpu": {"graph": "kron:16", "small": "kron:12", "uniform": "urand:14"},
}
_ON_GRAPH = {
    "memory": graph_ways.memory,
    "file": graph_ways.file,
    "figure7": graph_drives.figure7,
    "figure9": graph_drives.figure9,
    "figure10": graph_ways.figure10,
    "figure11": graph_drives.figure11,
}


def run(
    device: str | None,
    folder: Path,
    title: str,
    make: Callable[[Device, graphs.CsrGraph], Algorithm],
    papers: Papers,
    options: Options,
    wanted: Mapping[str, str],
    parts: str,
) -> Report:
    """Measure the parts that are named, on the graphs that are wanted or those of the device."""
    if unknown := set(parts.split(",")) - set(PARTS.split(",")):
        raise ArgumentError(f"parts are {PARTS}, not {', '.join(sorted(unknown))}")
    where = resolve(device)
    options = replace(options, slower=options.slower or _SLOWER[where.kind])
    names = {name: what or _GRAPHS[where.kind][name] for name, what in wanted.items()}
    report = Report(
        title=title,
        settings={**names, "parts": parts, **asdict(options)},
        machine=machine_facts(where.describe()),
    )
    bench = GraphBench(where, report, make, papers, options)

    @functools.cache
    def made(name: str) -> graphs.CsrGraph:
        return graphs.load(names[name], folder / name)

    for part in parts.split(","):
        if part == "figure8":
            graph_ways.figure8(bench, made("small"))
        elif part == "by_degree":
            _ordered(bench, made("graph"), folder / "by_degree")
        elif part == "interface":
            for name in ("graph", "uniform"):
                interface(bench, made(name), names[name])
        else:
            _ON_GRAPH[part](bench, made("graph"))
    return report


def _ordered(bench: GraphBench, graph: graphs.CsrGraph, folder: Path) -> None:
    """The same graph with its vertices numbered by falling degree."""
    ordered = graphs.load(graph.folder, folder, by_degree=True)
    graph_ways.memory(bench, ordered, "by degree, ")
    graph_ways.file(bench, ordered, "by degree, ")
