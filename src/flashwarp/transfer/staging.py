"""`StagingRing`: pinned host buffers, lent again and again, within a budget of bytes.

A buffer returns to the ring when everyone who holds it has released it and every copy that it takes
part in has ended, whichever comes last. So nothing is overwritten while it is read or copied.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flashwarp import _waiting, endings
from flashwarp.config import integer, parse_bytes
from flashwarp.device import TIMEOUT_S, Device, DeviceMemory
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceTimeout,
    FlashwarpError,
)

__all__ = ["StagingBuffer", "StagingRing"]

_log = logging.getLogger(__name__)

_BUFFER_BYTES = 16 << 20
_MOST = 1 << 48


class InFlight(Protocol):
    """A copy, as far as a buffer needs it; every `Ticket` is one."""

    def over(self) -> bool:
        """Return whether it has ended, well or not."""


class Lender(Protocol):
    """A ring or pool, as far as its buffers need it."""

    _lock: endings.Lock

    def _take_back(self, memory: DeviceMemory, copies: list[InFlight]) -> None: ...


class StagingBuffer:
    """One buffer of a ring or pool, lent to its holders until the last of them releases it.

    Any thread may use and release it. A buffer that is lost is released, and its memory stays as it
    is while an array of `as_numpy` lives.

    Attributes
    ----------
    nbytes : int
        Its size.
    """

    def __init__(self, lender: Lender, memory: DeviceMemory) -> None:
        self.nbytes = memory.nbytes
        self._lender = lender
        self._memory = memory
        self._users = 1
        # Copies that read or write it. The ring looks at them when the buffer has come back.
        self._copies: list[InFlight] = []
        self._give_back = weakref.finalize(self, lender._take_back, memory, self._copies)
        self._give_back.atexit = False

    @property
    def address(self) -> int:
        """Where it is, for the host and the device. Raises ClosedError after its release."""
        self._check_held()
        return self._memory.address

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """Return its bytes, not a copy; the array holds the buffer."""
        self._check_held()
        return np.asarray(_Bytes(self))

    def retain(self) -> StagingBuffer:
        """Add a holder, who must call `release` as well. Returns the buffer."""
        endings.holding([self._lender._lock], self._add_user)
        return self

    def _add_user(self) -> None:
        self._check_held()
        self._users += 1

    def release(self) -> None:
        """End one holder's use; the last one's gives the buffer back. Raises if nobody held it."""
        endings.holding([self._lender._lock], self._drop_user)

    def _drop_user(self) -> None:
        self._check_held()
        self._users -= 1
        if self._users == 0:
            self._give_back()

    @property
    def released(self) -> bool:
        """Whether nobody holds it any more."""
        return not self._give_back.alive

    def joins(self, copy: InFlight) -> None:
        """Keep the buffer from its next holder until a copy is over. For who starts the copy."""
        self._check_held()
        # Of the copies that are over, only the list would grow.
        self._copies[:] = [each for each in self._copies if not each.over()]
        self._copies.append(copy)

    def _check_held(self) -> None:
        if self.released:
            raise ClosedError(
                "the staging buffer was released, and may belong to somebody else now: release it "
                "after its last use, or `retain` it for each holder"
            )

    def __repr__(self) -> str:
        if self.released:
            return "<StagingBuffer, released>"
        return f"<StagingBuffer of {self.nbytes} bytes at {self._memory.address:#x}>"


class _Bytes:
    """The object that gives a buffer to numpy. numpy holds it, and it holds the buffer."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "version": 3,
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
        }


class StagingRing(endings.OfProcess):
    """A bounded set of pinned buffers of one size, which grows in the background.

    The first buffer can be used as soon as it is pinned; a thread pins the others meanwhile, until
    the budget is reached. (Pinning takes 0.3 s for each GiB, ten times as long as a copy.)

    Parameters
    ----------
    device : Device
        Whose copies pass through it. On a GPU the memory is pinned; on the CPU it is ordinary.
    budget : int or str
        The most bytes that the ring ever allocates: 1 << 30, or "4 GiB".
    buffer : int or str
        Bytes of each buffer. Default: 16 MiB, which a copy engine needs 0.3 ms for.

    Raises
    ------
    ArgumentError
        If the budget has no room for one buffer.

    Examples
    --------
    >>> from flashwarp.device import CpuDevice
    >>> from flashwarp.transfer import StagingRing
    >>> with StagingRing(CpuDevice(), budget="1 MiB", buffer="256 KiB") as ring:
    ...     buffer = ring.acquire(timeout_s=10)
    ...     buffer.as_numpy()[:4] = 7
    ...     buffer.release()
    ...     ring.buffers
    4
    """

    _kind = "staging ring"

    def __init__(
        self, device: Device, budget: int | str, buffer: int | str = _BUFFER_BYTES
    ) -> None:
        super().__init__()
        self.device = device
        self.buffer_bytes = integer("buffer", parse_bytes(buffer, "buffer"), 1, _MOST)
        self.budget_bytes = integer("budget", parse_bytes(budget, "budget"), 1, _MOST)
        self.buffers = self.budget_bytes // self.buffer_bytes
        if self.buffers == 0:
            raise ArgumentError(
                f"a budget of {self.budget_bytes} bytes has no room for one buffer of "
                f"{self.buffer_bytes} bytes: raise the budget, or take smaller buffers"
            )
        self._lock = endings.Lock()
        self._made: list[DeviceMemory] = []
        # What is free, by address: adding twice adds once, so an interrupted step can be repeated.
        self._free: dict[int, DeviceMemory] = {}
        self._line: deque[object] = deque()  # who waits for a buffer
        # Came back, and some copy may still use it. Appended to without the lock, because a buffer
        # may be lost while this thread holds it.
        self._returned: deque[tuple[DeviceMemory, list[InFlight]]] = deque()
        self._failure: FlashwarpError | None = None
        endings.remember(self)
        self._grower = threading.Thread(target=self._grow, name="flashwarp-pinning", daemon=True)
        endings.start(self._grower)

    # What it has.

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated so far, at most the budget."""
        return len(self._made) * self.buffer_bytes

    @property
    def free_buffers(self) -> int:
        """Buffers that can be lent at once."""
        self._sort_returned()
        return len(self._free)

    @property
    def failure(self) -> FlashwarpError | None:
        """Why the ring stopped growing before its budget; None if nothing failed."""
        return self._failure

    def wait_grown(self, timeout_s: float = TIMEOUT_S) -> None:
        """Block until the ring has its budget. Raises what has stopped it, or DeviceTimeout."""
        self._check_usable()
        waited = _waiting.until(lambda: not self._growing(), timeout_s)
        if waited is not None:
            raise DeviceTimeout(
                f"the ring has {len(self._made)} of {self.buffers} buffers after {waited:.1f} s "
                f"(limit {timeout_s:g} s)"
            )
        if self._failure is not None:
            raise self._failure

    # Lending.

    def acquire(self, timeout_s: float = TIMEOUT_S) -> StagingBuffer:
        """Lend a buffer, with any content; blocks until one is free. Who asked first gets it first.

        Raises
        ------
        DeviceTimeout
            None was free in time. The message says what the others are waiting for.
        DeviceOutOfMemory, DeviceError
            Not one buffer could be pinned.
        ClosedError, ForkError
            The ring was closed, or belongs to the parent process.
        """
        found: list[StagingBuffer] = []
        place = object()

        def lent() -> bool:
            each = self._try() if self._line[0] is place else None
            if each is not None:
                found.append(each)
            return each is not None

        self._line.append(place)
        try:
            waited = _waiting.until(lent, timeout_s)
        finally:
            self._line.remove(place)
        if waited is not None:
            raise DeviceTimeout(
                f"no staging buffer was free for {waited:.1f} s (limit {timeout_s:g} s): "
                f"{self._account()}"
            )
        return found[0]

    def try_acquire(self) -> StagingBuffer | None:
        """Lend a buffer if one is free and nobody waits for it; never blocks.

        Raises as `acquire` does.
        """
        return None if self._line else self._try()

    def _try(self) -> StagingBuffer | None:
        self._check_usable()
        self._sort_returned()
        buffer = endings.holding([self._lock], self._lend)
        if buffer is None and self._failure is not None and not self._made:
            raise self._failure
        return buffer

    def _lend(self) -> StagingBuffer | None:
        self._check_usable()
        for address, memory in self._free.items():
            buffer = StagingBuffer(self, memory)  # gives itself back if this is interrupted
            del self._free[address]
            return buffer
        return None

    def _take_back(self, memory: DeviceMemory, copies: list[InFlight]) -> None:
        self._returned.append((memory, copies))
        if self._closed and not self._in_child:
            self._sort_returned()

    def _sort_returned(self) -> None:
        if self._returned:
            endings.holding([self._lock], self._free_returned)

    def _free_returned(self) -> None:
        """Free what came back and no copy uses; look at each once."""
        for _ in range(len(self._returned)):
            memory, copies = self._returned[0]
            if all(copy.over() for copy in copies):
                if self._closed:
                    memory.close()
                else:
                    self._free[memory.address] = memory
                self._returned.popleft()
            else:
                self._returned.rotate(-1)

    def _account(self) -> str:
        """Say where the buffers are, for an error."""
        made, copying, free = len(self._made), len(self._returned), len(self._free)
        parts = [f"of {made} buffers of {self.buffer_bytes} bytes {made - copying - free} are held"]
        if copying:
            parts.append(f"{copying} are released and in copies that have not ended")
        if self._growing():
            parts.append(f"{self.buffers - made} more are being pinned")
        else:
            parts.append(f"the budget is {self.budget_bytes} bytes")
        if self._failure is not None:
            parts.append(f"pinning more failed ({self._failure})")
        return ", ".join(parts) + ": release buffers earlier, or raise the budget"

    # Growing.

    def _growing(self) -> bool:
        return self._grower.is_alive() and not self._closed

    def _grow(self) -> None:
        try:
            while len(self._made) < self.buffers and not self._closed:
                memory = self.device.allocate_host(self.buffer_bytes)
                if not endings.holding([self._lock], partial(self._add, memory)):
                    memory.close()
        except FlashwarpError as error:
            if self._closed:
                return
            self._failure = error
            _log.warning(
                "pinning stopped at %d of %d bytes, with which the ring goes on: %s",
                self.allocated_bytes,
                self.budget_bytes,
                error,
            )

    def _add(self, memory: DeviceMemory) -> bool:
        if self._closed:
            return False
        self._made.append(memory)
        self._free[memory.address] = memory
        return True

    # The end.

    def close(self) -> None:
        """Free the buffers; one that is held or in a copy is freed when it comes back.

        Waits for the buffer that is being pinned. May be called twice.
        """
        if self._in_child:
            return
        endings.uninterrupted(self._release)

    def _release(self) -> None:
        with self._lock:
            self._closed = True
        self._grower.join()
        with self._lock:
            free, self._free = self._free, {}
            for memory in free.values():
                memory.close()
            self._made.clear()
        self._sort_returned()
        endings.forget(self)

    def __repr__(self) -> str:
        if self._closed:
            return "<StagingRing, closed>"
        return (
            f"<StagingRing of {len(self._made)} of {self.buffers} buffers of {self.buffer_bytes} "
            f"bytes on {self.device.name}>"
        )
