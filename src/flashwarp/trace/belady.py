"""Belady's optimum: the fewest misses that any policy could have, knowing the future.

MIN evicts the line whose next use is farthest away. Two bounds: of a cache that may put a line into
any frame, and of one with sets, which is what a policy within sets can reach at best.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from flashwarp.config import integer
from flashwarp.errors import ArgumentError


def min_misses(lines: npt.NDArray[np.int64], capacity: int) -> int:
    """Count the misses of MIN in a cache of `capacity` lines, each of which may be anywhere.

    Examples
    --------
    >>> import numpy as np
    >>> from flashwarp.trace import min_misses
    >>> min_misses(np.array([1, 2, 3, 1, 2, 3]), 2)
    4
    """
    if integer("capacity", capacity) < 1:
        raise ArgumentError(f"a cache of {capacity} lines holds nothing")
    # The farthest first. An entry that the line's later use has replaced is passed over.
    farthest: list[tuple[int, int]] = []
    next_of: dict[int, int] = {}
    misses = 0
    for line, following in zip(lines.tolist(), _next_uses(lines).tolist(), strict=True):
        if line not in next_of:
            misses += 1
            while len(next_of) == capacity:
                negative, victim = heapq.heappop(farthest)
                if next_of.get(victim) == -negative:
                    del next_of[victim]
        next_of[line] = following
        heapq.heappush(farthest, (-following, line))
    return misses


def _next_uses(lines: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each access the position of the next one to its line; past the end: a position each."""
    count = len(lines)
    order = np.argsort(lines, kind="stable")
    # Lines that are never used again differ, so that each has its own entry.
    result = np.arange(count, 2 * count, dtype=np.int64)
    same = lines[order[1:]] == lines[order[:-1]]
    result[order[:-1][same]] = order[1:][same]
    return result


def min_misses_in_sets(lines: npt.NDArray[np.int64], sets: int, ways: int) -> int:
    """Count the misses of MIN within each set of a set-associative cache."""
    if integer("sets", sets) < 1:
        raise ArgumentError(f"a cache of {sets} sets holds nothing")
    number = lines % sets
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order])) + 1
    return sum(min_misses(part, ways) for part in np.split(lines[order], starts) if part.size)
