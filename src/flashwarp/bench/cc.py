"""Connected components on graphs larger than the cache: BaM's figures 7 to 11.

One pass over all lists joins the trees of the vertices (the link and compress of Afforest), so
every way reads each entry once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flashwarp.bench import graph_parts
from flashwarp.bench.graph_bench import Options, Papers
from flashwarp.bench.graph_parts import PARTS
from flashwarp.bench.graph_solve import Components
from flashwarp.probe.report import Report

__all__ = ["run"]

_PAPERS = Papers(
    cached_over_none="12.65 (BaM Fig. 8)",
    reuse_over_naive="11.24 (BaM Fig. 8)",
    four_drives="4 of 4 (BaM 5.2)",
    kinds=(("PM1735", "1.0 (BaM Fig. 9)"), ("980 Pro", "1 / 2.68 (BaM Fig. 9)")),
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
    slower: Annotated[float, "Divides the modelled drives' ceilings; 50 on the CPU device."] = 0,
    runs: Annotated[int, "How often each way has its turn."] = 3,
) -> Report:
    """Find components through every way to read the lists."""
    return graph_parts.run(
        device,
        folder,
        "Connected components",
        Components,
        _PAPERS,
        Options(line=line, file_line=file_line, share=share, slower=slower, runs=runs),
        {"graph": graph, "small": small, "uniform": uniform},
        parts,
    )
