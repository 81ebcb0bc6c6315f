"""How a pipeline moves its batches, and how much it has moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["PipelineExplanation", "PipelineStats"]


@dataclass(frozen=True)
class PipelineExplanation:
    """By which way batches move, and why; `str` gives a text for people."""

    way: str
    """"pull", "copies", "ring", "direct" or "workers"."""
    reason: str
    multiprocessors: int
    """How many move rows, at most."""
    host_threads: int
    """How many threads of the host move rows, at most."""
    array: str
    """The data path of the array."""

    def __str__(self) -> str:
        return "\n".join(
            (
                f"way         {self.way}: {self.reason}",
                f"uses        {self.multiprocessors} multiprocessors, {self.host_threads} threads "
                "of the host",
                f"data path   {self.array}",
            )
        )


@dataclass
class Moved:
    """What went one way."""

    batches: int = 0
    rows: int = 0
    nbytes: int = 0


@dataclass
class PipelineStats:
    """What a pipeline has moved: by way and direction, such as "pull, prefetch"."""

    moved: dict[str, Moved] = field(default_factory=dict)
    engine: dict[str, Any] | None = None
    """The counters of host threads that move rows, with the decisions on their number."""

    def note(self, way: str, verb: str, rows: int, nbytes: int) -> None:
        """Count a batch."""
        found = self.moved.setdefault(f"{way}, {verb}", Moved())
        found.batches += 1
        found.rows += rows
        found.nbytes += nbytes
