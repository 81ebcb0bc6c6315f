"""Records and options of benchmarks. A record has rows, and names each part that was left out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TypeVar

from flashwarp.config import parse_bytes
from flashwarp.device import Device
from flashwarp.errors import ArgumentError
from flashwarp.probe.report import Report, Row

__all__ = ["Record", "by_kind", "bytes_of", "listed"]

Value = TypeVar("Value", int, float, str)


class Record(Report):
    """The report of a run: rows beside ceilings or alternatives, and parts that were left out."""

    _end = math.inf

    def row(
        self, name: str, value: float, unit: str, reference_name: str = "", reference: float = 0.0,
        target: float = 0.0, checked: bool | None = None, paper: str = "", note: str = "",
        footprint: int = 0,
    ) -> None:  # fmt: skip
        """Append a measurement; the arguments are those of `Row`."""
        against = reference_name, reference, target
        self.add(Row(name, value, unit, *against, checked, paper, note, footprint))

    def end_in(self, seconds: float) -> None:
        """Leave out what would begin after so many seconds."""
        self._end = time.monotonic() + seconds

    def is_late(self, name: str) -> bool:
        """Return whether no time is left for a measurement, and then leave it out."""
        if time.monotonic() <= self._end:
            return False
        self.leave_out(name, "no time was left")
        return True

    def leave_out(self, name: str, why: str) -> None:
        """Note a part that is left out, with the reason."""
        self.settings.setdefault("left out", {})[name] = why[:500]
        print(f"left out: {name}: {why}", flush=True)


def listed(option: str, text: str, allowed: Sequence[str] = ()) -> list[str]:
    """Split the text of an option at its commas; refuse names that are not allowed."""
    names = [each.strip() for each in text.split(",")]
    for name in names if allowed else ():
        if name not in allowed:
            raise ArgumentError(f"{option}={text!r}: {name!r} is none of {', '.join(allowed)}")
    return names


def by_kind(device: Device, given: Value, gpu: Value, cpu: Value) -> Value:
    """Return an option, or if it is empty or 0, its default on a device of this kind."""
    return given or (gpu if device.kind == "cuda" else cpu)


def bytes_of(device: Device, given: str, gpu: str, cpu: str) -> int:
    """Return the bytes of an option, as `by_kind` does."""
    return parse_bytes(by_kind(device, given, gpu, cpu))
