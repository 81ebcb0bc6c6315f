"""Graphs over modelled drives: BaM's Figures 7, 9 and 11.

The lists lie in memory, in stripes of a line over modelled drives. Each drive has a controller that
delays completions by the latency and the ceilings of the drive (docs/hardware.md). Commands,
completions, cache and data are real.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.drives.modelled import modelled
from benchmarks.graphs.base import GraphBench, cache_bytes
from flashwarp import graphs
from flashwarp.config import parse_bytes
from flashwarp.nvme.group import ControllerGroup

__all__ = ["drives", "kinds", "most_queue_pairs", "open_drives", "queue_pairs"]

# BaM: 8 GB of cache for lists of 32 GB.
_SHARE = 1 / 4
_COUNTS = (1, 2, 4, 8)
_KINDS = ("P5800X", "PM1735", "980 Pro")
_FOUR = 4
# Of all drives together. A CPU thread looks after every queue pair while it waits, and there are as
# few threads as cores.
_QUEUE_PAIRS = {"cuda": (128, 64, 40, 20, 8, 4), "cpu": (16, 8, 4)}


@dataclass(frozen=True)
class _Drives:
    """How many drives of which kind, and the queue pairs of all together."""

    kind: str
    count: int
    queue_pairs: int

    def __str__(self) -> str:
        return f"{self.count} modelled drive{'s' if self.count > 1 else ''} {self.kind}"


def drives(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """One to eight drives of the fastest kind: BaM's Figure 7."""
    one = 0.0
    for count in _COUNTS:
        some = _Drives(_KINDS[0], count, most_queue_pairs(bench))
        rate, right, read = _solve(bench, graph, some)
        one = one or rate
        bench.add(
            f"{some}",
            rate,
            right,
            4 * graph.entries,
            "as many times one drive" if count > 1 else "",
            one * count,
            paper=bench.papers.four_drives if count == _FOUR else "",
            note=read,
        )


def kinds(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """Four drives of each kind of BaM's Table 2: its Figure 9."""
    papers = dict(bench.papers.kinds)
    fastest = 0.0
    for kind in _KINDS:
        some = _Drives(kind, _FOUR, most_queue_pairs(bench))
        rate, right, read = _solve(bench, graph, some)
        fastest = fastest or rate
        bench.add(
            f"{some}, each kind",
            rate,
            right,
            4 * graph.entries,
            f"{_FOUR} {_KINDS[0]}" if kind != _KINDS[0] else "",
            fastest,
            paper=papers.get(kind, ""),
            note=read,
        )


def queue_pairs(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """Fewer and fewer queue pairs for four drives together: BaM's Figure 11."""
    most, first = 0.0, most_queue_pairs(bench)
    for pairs in _QUEUE_PAIRS[bench.device.kind]:
        some = _Drives(_KINDS[0], _FOUR, pairs)
        rate, right, read = _solve(bench, graph, some)
        most = most or rate
        bench.add(
            f"{some}, {pairs} queue pairs",
            rate,
            right,
            4 * graph.entries,
            f"{first} queue pairs" if pairs != first else "",
            most,
            paper="1.0 above 40 pairs, less from 40 on (BaM Fig. 11)" if pairs != first else "",
            note=read,
        )


def _solve(bench: GraphBench, graph: graphs.CsrGraph, drives: _Drives) -> tuple[float, bool, str]:
    """Rate over these drives, whether the answer was right, and what was read for it."""
    if (graph.folder, drives) not in bench.measured:
        bench.measured[graph.folder, drives] = _measure(bench, graph, drives)
    return bench.measured[graph.folder, drives]


def _measure(bench: GraphBench, graph: graphs.CsrGraph, drives: _Drives) -> tuple[float, bool, str]:
    lists = graph.in_memory()
    with ExitStack() as stack:
        array = stack.enter_context(
            open_drives(
                bench, lists, lists.nbytes * _SHARE, drives.kind, drives.count, drives.queue_pairs
            )
        )
        reader = bench.reader(stack, graph, array)
        algorithm = bench.algorithm(stack, graph)
        speed, right = bench.turns(
            algorithm, {"cached": partial(reader.solve, algorithm, "cached")}
        )
        stats = array.stats
        solved = bench.options.runs + 1
        seconds = algorithm.entries / speed["cached"] / 1e9
        note = (
            f"read {stats.bytes_read / solved / (4 * algorithm.entries):.2f} bytes for each byte "
            f"needed, {stats.bytes_read / solved / seconds / 1e9:.3g} GB/s"
        )
    return speed["cached"], right["cached"], note


def most_queue_pairs(bench: GraphBench) -> int:
    """As many as BaM has, or as this device can look after."""
    return _QUEUE_PAIRS[bench.device.kind][0]


def open_drives(
    bench: GraphBench,
    data: NDArray[Any],
    cache: float | fw.Cache,
    kind: str,
    count: int,
    queue_pairs: int,
) -> fw.Array:
    """Open one axis of elements over `count` modelled drives, striped by lines."""
    line = parse_bytes(bench.options.line)
    stripes = -(-data.nbytes // (line * count)) * count
    padded = np.zeros(stripes * line // data.itemsize, data.dtype)
    padded[: len(data)] = data
    dealt = padded.reshape(-1, count, line // data.itemsize)
    members = [
        fw.storage.Memory(np.ascontiguousarray(dealt[:, n]).reshape(-1), writable=False)
        for n in range(count)
    ]
    return fw.open(
        fw.storage.Striped(members, line),
        "r",
        data.dtype,
        len(data),
        device=bench.device,
        cache=cache if isinstance(cache, fw.Cache) else cache_bytes(cache),
        line=line,
        controller=ControllerGroup(
            [
                fw.SoftwareController(
                    queue_pairs=queue_pairs // count,
                    model=modelled(kind, bench.options.slower, seed=n + 1),
                )
                for n in range(count)
            ]
        ),
    )
