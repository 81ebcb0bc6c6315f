"""`Word`: a counter in pinned memory, for which copies of an engine wait as long as a test wants.

Users cannot do that: only a test must not race with a copy.
"""

from __future__ import annotations

from typing import Any

from flashwarp import _native
from flashwarp.device import CpuDevice, Device
from flashwarp.transfer import CopyEngine, Direction


class Word:
    """A counter of 64 bits, 0 at first; it lives as long as its device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.allocate_host(64, 64)

    def hold(self, engine: CopyEngine, direction: Direction, value: int) -> None:
        """Make later copies of one direction wait until the word is at least `value`."""
        copier: Any = engine._copiers[direction]
        queue = copier._native if isinstance(self._device, CpuDevice) else copier._queue
        queue.wait_word(self._memory.address, value)

    def store(self, value: int) -> None:
        """Let them go; calls no driver, which might wait for them."""
        _native.store_word(self._memory.address, value)
