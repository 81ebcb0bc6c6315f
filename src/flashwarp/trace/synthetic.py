"""Traces made on the spot: what papers on replacement use, and a search in a real graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError
from flashwarp.trace.format import Trace
from flashwarp.trace.record import ranges

_LINE_BYTES = 4096
# 32 MiB of neighbours, in lines that random access is good for.
_GRAPH = "kron:18"
_GRAPH_LINE_BYTES = 512
# Lines of the synthetic traces; a graph has its own.
_LINES = 20_000


def _zipf(accesses: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Independent accesses; the k-th most popular of 20,000 lines has a share of 1 / k."""
    weights = 1.0 / np.arange(1, _LINES + 1)
    popular = random.choice(_LINES, size=accesses, p=weights / weights.sum())
    # Popular lines are anywhere.
    return np.asarray(random.permutation(_LINES)[popular], np.int64)


def _scan_zipf(accesses: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """The same, and after each 2,000 accesses a scan over 2,000 lines that never come again."""
    chunk = 2000
    # Rounds of popular lines and a scan, until there are enough of them.
    rounds = -(-accesses // (2 * chunk))
    popular = _zipf(rounds * chunk, random).reshape(rounds, chunk)
    scans = _LINES + np.arange(rounds * chunk).reshape(rounds, chunk)
    return np.concatenate([popular, scans], axis=1).reshape(-1)[:accesses]


def _loop(accesses: int, random: np.random.Generator) -> npt.NDArray[np.int64]:  # noqa: ARG001
    """One line after the other, over 2,000 lines again and again."""
    return np.arange(accesses, dtype=np.int64) % 2000


def _bfs(accesses: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Breadth-first searches of a Kronecker graph of 262,144 vertices, one source after another.

    Accesses are the lines of 512 bytes that hold the neighbours of each vertex visited.
    """
    from flashwarp.graphs import load

    with tempfile.TemporaryDirectory(prefix="flashwarp-") as folder:
        graph = load(_GRAPH, Path(folder), seed=int(random.integers(1 << 31)))
        neighbours = graph.in_memory()
        offsets = np.asarray(graph.offsets)
        parts: list[npt.NDArray[np.int64]] = []
        while sum(map(len, parts)) < accesses:
            source = graph.pick_sources(1, int(random.integers(1 << 31)))[0]
            parts += _search(offsets, neighbours, source)
    return np.concatenate(parts)[:accesses]


def _search(
    offsets: npt.NDArray[np.int64], neighbours: npt.NDArray[np.uint32], source: int
) -> list[npt.NDArray[np.int64]]:
    """The lines that each level of a search reads: the lists of its vertices, in their order."""
    seen = np.zeros(len(offsets) - 1, bool)
    seen[source] = True
    frontier = np.array([source])
    parts = []
    while frontier.size:
        counts = offsets[frontier + 1] - offsets[frontier]
        positions = ranges(offsets[frontier], counts)
        lines = positions * neighbours.itemsize // _GRAPH_LINE_BYTES
        # A list reads a line once, however many of its entries are there.
        owner = np.repeat(frontier, counts)
        first = np.ones(len(lines), bool)
        first[1:] = (lines[1:] != lines[:-1]) | (owner[1:] != owner[:-1])
        parts.append(lines[first])
        reached = np.unique(neighbours[positions])
        frontier = reached[~seen[reached]].astype(np.int64)
        seen[frontier] = True
    return parts


Maker = Callable[[int, np.random.Generator], npt.NDArray[np.int64]]
SYNTHETIC: dict[str, Maker] = {"zipf": _zipf, "scan+zipf": _scan_zipf, "loop": _loop, "bfs": _bfs}
"""Those that `make` knows, by name."""


def make(name: str, accesses: int = 200_000, seed: int = 1) -> Trace:
    """Make a trace of this name and length; the same seed gives the same trace.

    Examples
    --------
    >>> from flashwarp.trace import make
    >>> len(make("zipf", accesses=1000))
    1000
    """
    maker = SYNTHETIC.get(name)
    if maker is None:
        raise ArgumentError(f"no trace is called {name!r}; there are {', '.join(SYNTHETIC)}")
    accesses, seed = integer("accesses", accesses), integer("seed", seed, 0, SIZE_MAX)
    if accesses < 1:
        raise ArgumentError(f"a trace of {accesses} accesses says nothing")
    line_bytes = _GRAPH_LINE_BYTES if name == "bfs" else _LINE_BYTES
    return Trace(maker(accesses, np.random.default_rng(seed)), line_bytes, name)
