"""Edges on their way into a graph: arrays of bounded size, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flashwarp import config, endings

VERTICES_MAX = 1 << 32
"""A vertex is 4 bytes in a file."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Edges:
    """Some edges: all arrays have one length."""

    source: NDArray[np.uint32]
    target: NDArray[np.uint32]
    weight: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class EdgeSource:
    """All edges of a graph, to be read once."""

    vertices: int
    edges: Iterable[Edges]
    symmetric: bool
    """Whether each edge is to be stored in both directions."""
    weighted: bool = False
    degrees: NDArray[np.int64] | None = None
    """How many edges each vertex has, where that is known: work is then dealt by it."""
    count: int = 0
    """How many edges there are; 0 if that is not known before they are read."""
    labels: NDArray[np.uint32] | None = None
    """What the user calls each vertex, where that is not its number."""


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results in order, computed by a thread a core, with a bounded number in flight."""
    threads = config.cores()
    waiting: deque[Future[Result]] = deque()
    with endings.Pool(threads, "flashwarp-edges") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) == 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
