"""A sparse matrix times a vector, both steps of its interface: AGILE's Figure 11.

The matrix is a generated graph in compressed sparse rows, with a value for each entry; columns and
values are two arrays on one cache. Every product is compared with scipy's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flashwarp.bench import graph_parts
from flashwarp.bench.graph_bench import Options, Papers
from flashwarp.bench.graph_solve import Product
from flashwarp.probe.report import Report

__all__ = ["run"]

_PAPERS = Papers(
    interface=(
        ("kron", "1 / 3.17 of what BaM's takes (AGILE Fig. 11)"),
        ("urand", "1 / 2.11 of what BaM's takes (AGILE Fig. 11)"),
    ),
)


def run(
    device: str | None,
    folder: Path,
    graph: Annotated[str, "kron:SCALE, urand:SCALE or a file; kron:24 on a GPU."] = "",
    uniform: Annotated[str, "The other graph; urand:22 on a GPU."] = "",
    line: Annotated[str, "Line of the cache."] = "4 KiB",
    slower: Annotated[float, "Divides the modelled drives' ceilings; 50 on the CPU device."] = 0,
    runs: Annotated[int, "How often each way has its turn."] = 5,
) -> Report:
    """Multiply on plain memory, through a full cache, and through an empty one."""
    return graph_parts.run(
        device,
        folder,
        "Sparse matrix times vector",
        Product,
        _PAPERS,
        Options(line=line, slower=slower, runs=runs),
        {"graph": graph, "uniform": uniform},
        "interface",
    )
