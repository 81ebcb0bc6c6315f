"""Bulk movement between a device, host memory and files, beside the work of kernels.

`pool_of` has the one pool of pinned buffers of a device, of which each `TransferClient` may take
its part. `DeviceQueue` queues copies on a GPU and signals their ends, for the directions of a
`CopyEngine` and the batches of pipelines. `Gatherer` collects scattered pieces with host threads,
and `LinkBandwidth` says how fast a link has been. Nothing here knows what is moved.
"""

from flashwarp import _names
from flashwarp.transfer.bandwidth import LinkBandwidth
from flashwarp.transfer.buffer import TransferBuffer
from flashwarp.transfer.copies import Copy, Direction
from flashwarp.transfer.device_queue import DeviceQueue
from flashwarp.transfer.engine import CopyEngine
from flashwarp.transfer.gatherer import Gatherer
from flashwarp.transfer.pool import Pool, TransferClient, pool_of

__all__ = [
    "Copy",
    "CopyEngine",
    "DeviceQueue",
    "Direction",
    "Gatherer",
    "LinkBandwidth",
    "Pool",
    "TransferBuffer",
    "TransferClient",
    "pool_of",
]

__getattr__, __dir__ = _names.later(__name__, {})
