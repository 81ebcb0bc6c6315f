"""Replay of a trace: one gather through the device code of the cache, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashwarp.array.opening import open as open_array
from flashwarp.cache.cache import Cache
from flashwarp.config import integer
from flashwarp.device import CpuDevice
from flashwarp.errors import ArgumentError
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import Policy, resolve_policy
from flashwarp.storage import Memory
from flashwarp.trace.format import Trace

# The shortest line: what a line holds makes no difference to which ones stay.
_LINE_BYTES = 512
# Rows gathered by one call, which is 32 MiB of lines.
_CHUNK = 1 << 16
# Storage stands for the lines, and only what is touched becomes memory.
_LINES_MAX = 1 << 27


@dataclass(frozen=True)
class Replay:
    """Hits and misses of a trace under one policy."""

    policy: str
    capacity_lines: int
    """Lines that the cache held: what was asked for, rounded down to an odd number of sets."""
    ways: int
    hits: int
    misses: int
    evictions: int
    refusals: int
    """How often the policy chose a line that cannot be evicted."""

    @property
    def hit_rate(self) -> float:
        """Hits among all accesses."""
        return self.hits / max(1, self.hits + self.misses)


def replay(
    trace: Trace, policy: str | Policy = "clock", *, capacity_lines: int, ways: int = 8
) -> Replay:
    """Run a trace through a cache with one thread, so that the result is always the same.

    Parameters
    ----------
    trace : Trace
        Its lines are numbered densely first; see `Trace.numbered_densely`.
    policy : str or Policy
        As for `Cache`.
    capacity_lines : int
        Size of the cache in lines; at least `ways`.
    ways : int
        Frames of a set: 4, 8 or 16.

    Examples
    --------
    >>> from flashwarp import trace
    >>> trace.replay(trace.make("loop", accesses=4000), "fifo", capacity_lines=500).hits
    0
    """
    ways = integer("ways", ways, 1, 16)
    capacity_lines = integer("capacity_lines", capacity_lines)
    if capacity_lines < ways:
        raise ArgumentError(f"a cache of {capacity_lines} lines has no set of {ways} ways")
    chosen = resolve_policy(policy)
    lines = trace.numbered_densely().lines
    count = int(lines.max()) + 1 if lines.size else 1
    if count > _LINES_MAX:
        raise ArgumentError(f"a replay has room for {_LINES_MAX} lines, the trace touches {count}")
    with CpuDevice(threads=1) as device:
        cache = Cache(capacity_lines * _LINE_BYTES, _LINE_BYTES, ways, chosen, device)
        storage = Memory(np.zeros(count * _LINE_BYTES, np.uint8))
        array = open_array(
            storage,
            "r",
            np.uint8,
            (count, _LINE_BYTES),
            cache=cache,
            controller=SoftwareController(queue_pairs=1, commands=True),
            # Nothing is fetched ahead on this path, so accesses come in the order of the trace.
            strict="in_place",
        )
        array._attachment.launcher.in_order = True
        with cache, array:
            rows = np.empty((min(_CHUNK, len(lines)), _LINE_BYTES), np.uint8)
            for first in range(0, len(lines), _CHUNK):
                part = lines[first : first + _CHUNK]
                array.gather(part, out=rows[: len(part)])
            met = array.stats
            return Replay(
                policy=chosen.name,
                capacity_lines=cache.set_count * cache.ways,
                ways=ways,
                hits=met.hits,
                misses=met.misses,
                evictions=met.evictions,
                refusals=cache.refusals,
            )
