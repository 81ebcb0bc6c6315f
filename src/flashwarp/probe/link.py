"""How fast the copy engine moves bytes between host and GPU: the ceiling of plain copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashwarp.device import Device
from flashwarp.probe.timing import wall_seconds

__all__ = ["LINK_BYTES", "LinkRates", "measure_link"]

# The copy engine reaches its full rate from some 16 MiB on.
LINK_BYTES = 128 << 20
"""Bytes of one copy, and of the pinned memory that it needs."""

_ROUNDS = 4


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second each way; the best of some copies."""

    to_gpu: float
    to_host: float


def measure_link(device: Device) -> LinkRates:
    """Copy pinned memory to the device and back. Blocks for some hundredths of a second.

    Raises DeviceError, DeviceOutOfMemory included.
    """
    with device.allocate_host(LINK_BYTES) as pinned, device.allocate(LINK_BYTES) as memory:
        host = pinned.as_numpy()
        return LinkRates(
            to_gpu=_best_rate(lambda: device.upload(memory.address, host)),
            to_host=_best_rate(lambda: device.download_into(memory.address, host)),
        )


def _best_rate(copy: Callable[[], None]) -> float:
    return LINK_BYTES / min(wall_seconds(copy) for _ in range(_ROUNDS))
