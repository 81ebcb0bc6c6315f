"""Which launches defer their misses to a few blocks, and how many; see `cache/miss_list.cuh`.

A launch that waits for storage with all its warps holds every multiprocessor, and kernels of other
streams wait for it. If few blocks fetch what all have missed, other kernels run meanwhile.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

from flashwarp import config
from flashwarp.cache.cache import Volume
from flashwarp.nvme import Service

__all__ = ["NOT_DEFERRED", "Deferral", "Deferred"]

Deferred: TypeAlias = tuple[int, int, int, int]
"""Members of `ListUseStruct`."""

NOT_DEFERRED: Deferred = (0, 0, 0, 0)

# A block has 8 warps, each of which fetches up to 32 lines at a time: 2,048 lines in flight, and
# enough loads in flight to saturate PCIe. A drive of 7 GB/s and 100 us needs 171 lines of 4 KiB.
_BLOCKS = 8
_BLOCKS_OF_A_NAMESPACE = 2
_WARPS_OF_A_BLOCK = 8
_LINES_OF_A_BLOCK = _WARPS_OF_A_BLOCK * 32

# Unless the user asks: fewer lines come about as fast as the hand-over takes.
_LINES_MIN = 1 << 17

# With fewer blocks for each one that drains, a launch has little to leave.
_BLOCKS_PER_DRAIN = 4

# No two launches that run at a time have one number. Device code has 41 bits for it.
_numbers = itertools.count(1)
_NUMBER_MASK = (1 << 41) - 1


class Deferral:
    """How the launches on one array defer their misses.

    Parameters
    ----------
    volume : Volume
        Owns the list of misses.
    service : Service
        What serves the array's queue pairs.

    Attributes
    ----------
    blocks : int
        Blocks of a large launch that fetch deferred misses; 0: launches do not defer.
    """

    def __init__(self, volume: Volume, service: Service) -> None:
        self._service = service
        self._warps_at_once = volume.cache.device.warps_at_once
        self._list = 0 if volume.misses is None else volume.misses.address
        asked = config.current("drain_blocks").drain_blocks
        self._asked = asked >= 0
        self.blocks = 0
        if self._list:
            self.blocks = asked if self._asked else _drain_blocks(service)

    def of(self, items: int, warps: int, batch: int, *, elements: bool = False) -> Deferred:
        """Return how a launch of so many items and warps defers its misses, at most `batch` a warp.

        Each launch needs its own answer; a captured one keeps it. Small launches do not defer: they
        leave multiprocessors free, and a few warps would fetch their lines one after the other.
        Launches on `elements`, short rows that several share a line, defer only if the user asks:
        their hits would take longer.
        """
        blocks = self.blocks
        if (
            not blocks
            or (not self._asked and (elements or items < _LINES_MIN))
            or warps < self._warps_at_once
            or warps < blocks * _BLOCKS_PER_DRAIN * _WARPS_OF_A_BLOCK
            or items < blocks * _WARPS_OF_A_BLOCK * batch
            or self._service.plain_reads
        ):
            return NOT_DEFERRED
        return self._list, next(_numbers) & _NUMBER_MASK, blocks, batch


def _drain_blocks(service: Service) -> int:
    if not service.makes_warps_wait:
        return 0
    queues = service.queues
    slots = queues.count * queues.depth
    wanted = max(_BLOCKS, _BLOCKS_OF_A_NAMESPACE * service.namespace_count)
    # More lines than the rings have slots are never in flight.
    return max(1, min(wanted, -(-slots // _LINES_OF_A_BLOCK)))
