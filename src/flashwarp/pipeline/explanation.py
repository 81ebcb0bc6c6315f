"""How a pipeline moves its batches, and how much it has moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashwarp.explanation import Explanation

__all__ = ["PipelineStats", "explained"]


def explained(
    route: str, reason: str, multiprocessors: int, host_threads: int, array: str
) -> Explanation:
    """Explain by which route batches move, with how many of each at most, and why.

    `array` is the array's own route, and why it takes that.
    """
    facts = {"multiprocessors": multiprocessors, "host_threads": host_threads, "array": array}
    return Explanation(route, reason, facts)


@dataclass
class Moved:
    """What went by one route."""

    batches: int = 0
    rows: int = 0
    nbytes: int = 0


@dataclass
class PipelineStats:
    """What a pipeline has moved: by route and direction, such as "pull, prefetch"."""

    moved: dict[str, Moved] = field(default_factory=dict)
    engine: dict[str, Any] | None = None
    """The counters of host threads that move rows, with the decisions on their number."""

    def note(self, route: str, verb: str, rows: int, nbytes: int) -> None:
        """Count a batch."""
        found = self.moved.setdefault(f"{route}, {verb}", Moved())
        found.batches += 1
        found.rows += rows
        found.nbytes += nbytes
