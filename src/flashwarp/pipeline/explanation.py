"""How much a pipeline has moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
