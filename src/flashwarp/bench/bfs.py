"""Breadth-first search on graphs larger than the cache: BaM's figures 7 to 11 and AGILE's 11.

Mean over several sources with more than two neighbours, as BaM takes them. The rate counts the
entries of all lists that the searches look at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flashwarp.bench import graph_parts
from flashwarp.bench.graph_bench import Options, Papers
from flashwarp.bench.graph_parts import PARTS
from flashwarp.bench.graph_solve import Search
from flashwarp.probe.report import Report

__all__ = ["run"]

_PAPERS = Papers(
    cached_over_none="11.9 (BaM Fig. 8)",
    reuse_over_naive="6.07 (BaM Fig. 8)",
    four_drives="3.48 of 4 (BaM 5.2)",
    kinds=(("PM1735", "1.0 (BaM Fig. 9)"), ("980 Pro", "1 / 3.21 (BaM Fig. 9)")),
    interface=(
        ("kron", "1 / 1.93 of what BaM's takes (AGILE Fig. 11)"),
        ("urand", "1 / 2.27 of what BaM's takes (AGILE Fig. 11)"),
    ),
)


def run(
    device: str | None,
    folder: Path,
    graph: Annotated[str, "kron:SCALE, urand:SCALE or a file; kron:24 on a GPU."] = "",
    small: Annotated[str, "The graph of figure 8; kron:20 on a GPU."] = "",
    uniform: Annotated[str, "The other graph of `interface`; urand:22 on a GPU."] = "",
    parts: Annotated[str, "What to measure, with commas."] = PARTS,
    line: Annotated[str, "Line of the cache."] = "4 KiB",
    file_line: Annotated[str, "Line of the cache in front of the file."] = "64 KiB",
    share: Annotated[float, "Size of the cache in sizes of the lists."] = 0.5,
    sources: Annotated[int, "Searches of which the mean is taken."] = 4,
    slower: Annotated[float, "Divides the modelled drives' ceilings; 50 on the CPU device."] = 0,
    runs: Annotated[int, "How often each way has its turn."] = 3,
) -> Report:
    """Search through every way to read the lists."""
    return graph_parts.run(
        device,
        folder,
        "Breadth-first search",
        lambda where, made: Search(where, made, made.pick_sources(sources, seed=1)),
        _PAPERS,
        Options(
            line=line,
            file_line=file_line,
            share=share,
            slower=slower,
            sources=sources,
            runs=runs,
        ),
        {"graph": graph, "small": small, "uniform": uniform},
        parts,
    )
