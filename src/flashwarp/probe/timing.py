"""How benchmarks take time: device events around launches, medians, measurements in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

from flashwarp.device import Device

Name = TypeVar("Name", bound=str)


def wall_seconds(call: Callable[[], object]) -> float:
    """How long a call takes that returns when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def device_seconds(device: Device, launch: Callable[[], object], stream: object = None) -> float:
    """How long the device works on what `launch` queues on `stream`, between two events."""
    start, end = device.event(), device.event()
    start.record(stream)
    launch()
    end.record(stream)
    device.wait(stream)
    return end.elapsed_ms(start) / 1e3


def median_of(measure: Callable[[], float], runs: int = 5) -> float:
    """Return the median of several runs after one that does not count."""
    measure()
    return median(measure() for _ in range(runs))


def in_turns(measures: Mapping[Name, Callable[[], float]], runs: int = 5) -> dict[Name, float]:
    """Return the median of what each returns, when all take turns.

    A machine that is slow for a while then slows all of them. The first round does not count.
    """
    seen: dict[Name, list[float]] = {name: [] for name in measures}
    for turn in range(runs + 1):
        for name, measure in measures.items():
            value = measure()
            if turn > 0:
                seen[name].append(value)
    return {name: median(values) for name, values in seen.items()}
