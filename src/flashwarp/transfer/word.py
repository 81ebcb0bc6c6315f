"""`Word`: a counter in pinned memory that orders streams and host threads without calls of CUDA."""

from __future__ import annotations

from flashwarp import _native, _waiting
from flashwarp.config import integer
from flashwarp.device import TIMEOUT_S, Device
from flashwarp.device.memory import DeviceMemory
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError, ClosedError, DeviceTimeout

__all__ = ["Word"]

_MOST = (1 << 63) - 1


class Word(Closing):
    """A counter of 64 bits that only grows; streams and host threads store it and wait for it.

    `CopyEngine.wait_word` and `write_word` do so in the order of a stream. The methods here are for
    host threads, and none of them calls the CUDA driver: a thread whose `store` a stream waits for
    must not call CUDA before, because such a call may wait for that stream. What a thread has
    written to memory before `store` is visible to copies that waited for the value.

    Parameters
    ----------
    device : Device
        Whose streams use it.
    """

    def __init__(self, device: Device) -> None:
        # A cache line of its own.
        self._memory: DeviceMemory = device.allocate_host(64, 64)

    @property
    def address(self) -> int:
        """Where it is, for the host and the device."""
        if self._memory.closed:
            raise ClosedError("the word was closed")
        return self._memory.address

    @property
    def owners(self) -> object:
        """What keeps its memory allocated on a CPU device, whatever is closed."""
        return self._memory.owners

    @property
    def value(self) -> int:
        """The present value."""
        return _native.load_word(self.address)

    def store(self, value: int) -> None:
        """Raise the value. Never waits, and calls no driver."""
        now = self.value
        if integer("value", value, 0, _MOST) < now:
            raise ArgumentError(
                f"the word is {now} and cannot become {value}: streams that have waited for more "
                "would go on too early; store a larger value"
            )
        _native.store_word(self.address, value)

    def wait(self, value: int, timeout_s: float = TIMEOUT_S) -> None:
        """Block until the value is reached. Raises DeviceTimeout."""
        integer("value", value, 0, _MOST)
        waited = _waiting.until(lambda: self.value >= value, timeout_s)
        if waited is not None:
            raise DeviceTimeout(
                f"the word at {self.address:#x} is {self.value} after {waited:.1f} s (limit "
                f"{timeout_s:g} s), not yet {value}: what stores it has not come so far"
            )

    def close(self) -> None:
        """Free it. No stream may wait for it any more. May be called twice."""
        self._memory.close()

    def __repr__(self) -> str:
        return "<Word, closed>" if self._memory.closed else f"<Word {self.value}>"
