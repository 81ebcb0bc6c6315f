"""How much a pipeline has moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashwarp.device import Device
from flashwarp.observing import counting


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

    def counted(self, device: Device) -> counting.Entry:
        """Let `flashwarp top` see it until the entry leaves."""
        return counting.enter(device, self._counts)

    def _counts(self) -> dict[str, tuple[counting.Key, dict[str, int]]]:
        found = {}
        for name, moved in list(self.moved.items()):
            route, verb = name.split(", ")
            name_of = "bytes_read" if verb == "prefetch" else "bytes_written"
            found[name] = (counting.Key("pipeline", route), {name_of: moved.nbytes})
        return found
