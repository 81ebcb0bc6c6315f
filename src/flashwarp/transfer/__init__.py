"""Bulk movement between a device, host memory and files, beside the work of kernels.

`StagingRing` and `StagingPool` lend pinned buffers, `CopyEngine` copies on streams of its own,
`Gatherer` collects scattered pieces with host threads, and `LinkBandwidth` says how fast a link has
been. Nothing here knows what is moved.
"""

from flashwarp.transfer.bandwidth import LinkBandwidth
from flashwarp.transfer.engine import CopyEngine
from flashwarp.transfer.gatherer import Gatherer
from flashwarp.transfer.pool import StagingPool
from flashwarp.transfer.staging import StagingBuffer, StagingRing
from flashwarp.transfer.ticket import Direction, Ticket

__all__ = [
    "CopyEngine",
    "Direction",
    "Gatherer",
    "LinkBandwidth",
    "StagingBuffer",
    "StagingPool",
    "StagingRing",
    "Ticket",
]
