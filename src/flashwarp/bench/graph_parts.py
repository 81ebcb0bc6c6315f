"""The parts of the graph benchmarks, by name: what `bench/bfs.py` and `bench/cc.py` call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flashwarp import graphs
from flashwarp.bench import graph_ways
from flashwarp.bench.graph_bench import GraphBench, Options, Papers
from flashwarp.bench.graph_solve import Algorithm
from flashwarp.bench.report import Report, machine_facts
from flashwarp.device import Device, resolve
from flashwarp.errors import ArgumentError

__all__ = ["PARTS", "run"]

PARTS = "memory,file,figure8,figure10"

_ON_GRAPH = {
    "memory": graph_ways.memory,
    "file": graph_ways.file,
    "figure10": graph_ways.figure10,
}


def run(
    device: str | None,
    folder: Path,
    title: str,
    make: Callable[[Device, graphs.CsrGraph], Algorithm],
    papers: Papers,
    options: Options,
    graph: str,
    small: str,
    parts: str,
) -> Report:
    """Measure the parts that are named."""
    wanted = parts.split(",")
    if unknown := set(wanted) - set(PARTS.split(",")):
        raise ArgumentError(f"parts are {PARTS}, not {', '.join(sorted(unknown))}")
    where = resolve(device)
    on_gpu = where.kind == "cuda"
    names = {
        "graph": graph or ("kron:24" if on_gpu else "kron:16"),
        "small": small or ("kron:20" if on_gpu else "kron:12"),
    }
    report = Report(
        title=title,
        settings={
            **names,
            "line": options.line,
            "file_line": options.file_line,
            "cache_share": options.share,
        },
        machine=machine_facts(where.describe()),
    )
    bench = GraphBench(where, report, make, papers, options)
    made = {name: graphs.load(what, folder / name) for name, what in names.items()}
    for part in wanted:
        if part == "figure8":
            graph_ways.figure8(bench, made["small"])
        else:
            _ON_GRAPH[part](bench, made["graph"])
    return report
