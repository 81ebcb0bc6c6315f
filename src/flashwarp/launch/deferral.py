"""Which launches defer their misses to a few blocks, and how many; see `cache/miss_list.cuh`.

A warp that waits for storage holds its multiprocessor, and kernels of other streams wait for it. If
few blocks fetch what all have missed, other kernels run meanwhile.
"""

from __future__ import annotations

from flashwarp import _native, config
from flashwarp.cache.volume import Volume
from flashwarp.launch.rows import NOT_DEFERRED, Deferred
from flashwarp.nvme import Service

# A block has 8 warps, each of which fetches up to 32 lines at a time. A drive of 7 GB/s and 100 us
# needs 171 lines of 4 KiB in flight, so two blocks suffice for it. What host threads copy comes
# faster: 8 blocks have enough loads in flight to saturate PCIe. In place, a multiprocessor, which
# runs two blocks, reads 10 to 13 GB/s of host memory whatever its warps do.
_BLOCKS = 8
_BLOCKS_IN_PLACE = 12
_BLOCKS_OF_A_NAMESPACE = 2
_WARPS_OF_A_BLOCK = 8
_LINES_OF_A_BLOCK = _WARPS_OF_A_BLOCK * 32
_BLOCKS_MAX = 255  # that a list of misses can count

# With fewer than four blocks for each one that drains, a launch has little to leave.
_WARPS_PER_DRAIN = 4 * _WARPS_OF_A_BLOCK

# What passes the link in a third of a millisecond, in place. With less to fetch, all warps together
# are gone sooner than a list is drained.
_IN_PLACE_BYTES_MIN = 16 << 20

# The most that `element_bytes` makes of one.
_ELEMENTS_OF_A_ROW = 16


class Deferral:
    """How the launches on one array defer their misses.

    Parameters
    ----------
    volume : Volume
        Owns the list of misses.
    service : Service
        What serves the array's queue pairs.
    """

    def __init__(self, volume: Volume, service: Service) -> None:
        self._service = service
        self._list = 0 if volume.misses is None else volume.misses.address
        self._asked = config.current("drain_blocks").drain_blocks
        self._line_bytes = volume.cache.line_bytes
        routes = "in place", "host threads", "disk"
        self._blocks = dict.fromkeys(routes, self._asked if self._list else 0)
        if self._list and self._asked < 0:
            self._blocks = {route: _drain_blocks(service, route) for route in routes}

    @property
    def blocks(self) -> int:
        """Blocks of a launch that fetch deferred misses now; 0: launches do not defer."""
        if self._service.plain_reads:
            return self._blocks["in place"]
        return self._blocks["disk" if self._service.waits_for_disk else "host threads"]

    def count_min(self, segments: int) -> int:
        """Return from how many rows on a launch may defer, of so many lines each; 0: none does."""
        items = segments if self._asked < 0 else max(segments, _ELEMENTS_OF_A_ROW)
        return -(-min(filter(None, self._blocks.values()), default=0) * _WARPS_PER_DRAIN // items)

    def of(
        self, items: int, warps: int, bundle: int, blocks: int, *, elements: bool = False
    ) -> Deferred:
        """Return how a launch of so many items and warps defers misses, at most `bundle` a warp.

        Each launch needs a number of its own; a captured one keeps it. Launches
        of few warps do not defer: a hand-over takes as long as their misses. Launches on
        `elements`, short rows that several share a line, defer only if the user asks: their hits
        would take longer.
        """
        if not blocks or min(items, warps) < blocks * _WARPS_PER_DRAIN:
            return NOT_DEFERRED
        if self._asked < 0 and (
            elements
            or (self._service.plain_reads and items * self._line_bytes < _IN_PLACE_BYTES_MIN)
        ):
            return NOT_DEFERRED
        return self._list, _native.launch_number(), blocks, bundle


def _drain_blocks(service: Service, route: str) -> int:
    if not service.makes_warps_wait:
        return 0
    if route == "in place":
        return _BLOCKS_IN_PLACE
    queues = service.queues
    slots = queues.count * queues.depth
    wanted = _BLOCKS_OF_A_NAMESPACE * service.namespace_count
    if route != "disk":
        wanted = max(_BLOCKS, wanted)
    # More lines than the rings have slots are never in flight.
    return max(1, min(wanted, -(-slots // _LINES_OF_A_BLOCK), _BLOCKS_MAX))
