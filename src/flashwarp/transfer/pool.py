"""`StagingPool`: pinned host memory in blocks of any size, within a budget of bytes."""

from __future__ import annotations

from collections import deque
from functools import partial

from flashwarp import _waiting, endings
from flashwarp.config import integer, parse_bytes
from flashwarp.device import TIMEOUT_S, Device, DeviceMemory
from flashwarp.errors import ArgumentError, DeviceTimeout
from flashwarp.transfer.staging import InFlight, StagingBuffer

__all__ = ["StagingPool"]

_MOST = 1 << 48
# A block that is larger than this many times what is asked for is not lent for it.
_WASTE = 2
_SMALL_BYTES = 1 << 20


class StagingPool(endings.OfProcess):
    """Lends pinned blocks as large as the caller needs, and keeps them for the next one.

    Blocks are lent as `StagingBuffer`, under the rules of a `StagingRing`: one comes back when its
    last holder has released or lost it, no array shows it, and no copy uses it. A first block of a
    size must be pinned (0.3 s for each GiB); later ones are there.

    Parameters
    ----------
    device : Device
        Whose copies pass through it.
    budget : int or str
        The most bytes that are allocated at a time.
    """

    _kind = "staging pool"

    def __init__(self, device: Device, budget: int | str) -> None:
        super().__init__()
        self.device = device
        self.budget_bytes = integer("budget", parse_bytes(budget, "budget"), 1, _MOST)
        self._lock = endings.Lock()
        self._free: dict[int, DeviceMemory] = {}
        self._allocated = 0
        self._returned: deque[tuple[DeviceMemory, list[InFlight]]] = deque()
        endings.remember(self)

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now, lent and kept."""
        return self._allocated

    def acquire(self, nbytes: int, timeout_s: float = TIMEOUT_S) -> StagingBuffer:
        """Lend a block of at least `nbytes`, with any content; blocks until the budget has room.

        Raises
        ------
        ArgumentError
            More than the whole budget.
        DeviceTimeout
            The blocks that fill the budget did not come back in time.
        DeviceOutOfMemory
            The host has less memory than the budget.
        """
        integer("nbytes", nbytes, 1, _MOST)
        if nbytes > self.budget_bytes:
            raise ArgumentError(
                f"{nbytes} bytes are more than the budget of {self.budget_bytes} bytes of staging "
                "memory: raise it"
            )
        found: list[StagingBuffer] = []

        def lent() -> bool:
            self._check_usable()
            each = endings.holding([self._lock], partial(self._lend, nbytes))
            if each is not None:
                found.append(each)
            return each is not None

        waited = _waiting.until(lent, timeout_s)
        if waited is not None:
            raise DeviceTimeout(
                f"{nbytes} bytes of staging memory were not free for {waited:.1f} s (limit "
                f"{timeout_s:g} s): {self._allocated} of {self.budget_bytes} bytes are allocated, "
                f"and {sum(m.nbytes for m in self._free.values())} of these are free; what holds "
                "the others, such as a write that is under way, must end first"
            )
        return found[0]

    def _lend(self, nbytes: int) -> StagingBuffer | None:
        self._sort_returned()
        most = max(nbytes * _WASTE, _SMALL_BYTES)
        fits = [each for each in self._free.values() if nbytes <= each.nbytes <= most]
        if fits:
            memory = min(fits, key=lambda each: each.nbytes)
            buffer = StagingBuffer(self, memory)  # gives itself back if this is interrupted
            del self._free[memory.address]
            return buffer
        while self._free and self._allocated + nbytes > self.budget_bytes:
            _, unfit = self._free.popitem()
            self._allocated -= unfit.nbytes
            unfit.close()
        if self._allocated + nbytes > self.budget_bytes:
            return None
        memory = self.device.allocate_host(nbytes)
        self._allocated += nbytes
        return StagingBuffer(self, memory)

    def _take_back(self, memory: DeviceMemory, copies: list[InFlight]) -> None:
        self._returned.append((memory, copies))
        if self._closed and not self._in_child:
            endings.holding([self._lock], self._sort_returned)

    def _sort_returned(self) -> None:
        for _ in range(len(self._returned)):
            memory, copies = self._returned[0]
            if not all(copy.over() for copy in copies):
                self._returned.rotate(-1)
                continue
            if self._closed:
                self._allocated -= memory.nbytes
                memory.close()
            else:
                self._free[memory.address] = memory
            self._returned.popleft()

    def close(self) -> None:
        """Free the blocks; one that is held is freed when it comes back. May be called twice."""
        if not self._in_child:
            endings.uninterrupted(self._release)

    def _release(self) -> None:
        with self._lock:
            self._closed = True
            for memory in self._free.values():
                self._allocated -= memory.nbytes
                memory.close()
            self._free.clear()
            self._sort_returned()
        endings.forget(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._allocated} of {self.budget_bytes} bytes"
        return f"<StagingPool on {self.device.name}, {state}>"
