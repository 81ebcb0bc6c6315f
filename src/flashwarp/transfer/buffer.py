"""`TransferBuffer`: pinned host memory that is lent, and comes back when nobody uses it any more.

A buffer returns to its pool when everyone who holds it has released it and every copy that it takes
part in has ended, whichever comes last. So nothing is overwritten while it is read or copied.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp.device import Device, DeviceMemory, Registration
from flashwarp.device.memory import host_only
from flashwarp.errors import ClosedError, DeviceError

_log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Bytes that are pinned, and given back, at a time: from one multiple of it in memory to the next.
No copy may cross from one into the next, so copies are cut there. The end of a registration keeps
other threads from copies: for so many bytes less than a millisecond is expected, from the 0.07 s
that 4 GiB take to register, and was not measured."""

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20


class InFlight(Protocol):
    """A copy, as far as a buffer needs it: a `Copy` is one."""

    def over(self) -> bool:
        """Return whether it has ended, well or not."""


class Lender(Protocol):
    """A client of a pool, as far as its buffers need it."""

    lock: endings.Lock

    def take_back(self, block: Block, copies: list[InFlight]) -> None:
        """Take a block back, which copies may still use."""


class Block:
    """Host memory of huge pages, pinned piece by piece on a GPU, with any content.

    A disk takes reads into huge pages as fewer and larger requests. To allocate pinned memory by a
    driver took 0.4 ms for each MiB, for one thread at a time.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used_s = time.monotonic()
        sizes = (PIECE_BYTES, _HUGE_PAGE_BYTES, _PAGE_BYTES)
        alignment = next((each for each in sizes if nbytes >= each), _PAGE_BYTES)
        self.memory: DeviceMemory = host_only(device, nbytes, alignment)
        self._pinned: list[Registration] = []
        if device.kind != "cuda":
            return
        # This thread makes the pages; a driver would make those of one thread at a time.
        self.memory.as_numpy()[::_PAGE_BYTES] = 0
        try:
            for begin in range(0, nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, nbytes - begin)
                self._pinned.append(device.register_host(self.address + begin, size, False))
        except DeviceError as error:
            _log.info("%s allocates its transfer buffers: %s", device.name, error)
            self.close()
            self.memory = device.allocate_host(nbytes)

    @property
    def address(self) -> int:
        """Where it is, for the host and the device."""
        return self.memory.address

    def close(self, before_each: Callable[[], object] = lambda: None) -> None:
        """Free it, with a call before the end of each piece. Nothing may use it any more."""
        while self._pinned:
            before_each()
            self._pinned.pop().close()
        self.memory.close()


class TransferBuffer:
    """One buffer of a pool, lent to its holders until the last of them releases it.

    Any thread may use and release it. A buffer that is lost is released, and its memory stays as it
    is while an array of `as_numpy` lives.

    Attributes
    ----------
    nbytes : int
        Its size.
    taker : int
        The thread that has acquired it.
    """

    def __init__(self, lender: Lender, block: Block, nbytes: int, taker: int) -> None:
        self.nbytes = nbytes
        self.taker = taker
        self._lender = lender
        self._block = block
        self._users = 1
        # Copies that read or write it. The pool looks at them when the buffer has come back.
        self._copies: list[InFlight] = []
        self._give_back = weakref.finalize(self, lender.take_back, block, self._copies)
        self._give_back.atexit = False

    @property
    def address(self) -> int:
        """Where it is, for the host and the device. Raises ClosedError after its release."""
        self._check_held()
        return self._block.address

    @property
    def owners(self) -> tuple[object, ...]:
        """Objects that keep its memory allocated while running code holds them."""
        return self._block.memory.owners

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """Return its bytes, not a copy; the array holds the buffer."""
        self._check_held()
        return np.asarray(_Bytes(self))

    def retain(self) -> TransferBuffer:
        """Add a holder, who must call `release` as well. Returns the buffer."""
        endings.holding([self._lender.lock], self._add_user)
        return self

    def _add_user(self) -> None:
        self._check_held()
        self._users += 1

    def release(self) -> None:
        """End one holder's use; the last one's gives the buffer back. Raises if nobody held it."""
        endings.holding([self._lender.lock], self._drop_user)

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
                "the transfer buffer was released, and may belong to somebody else now: release it "
                "after its last use, or `retain` it for each holder"
            )

    def __repr__(self) -> str:
        if self.released:
            return "<TransferBuffer, released>"
        return f"<TransferBuffer of {self.nbytes} bytes at {self._block.address:#x}>"


class _Bytes:
    """The object that gives a buffer to numpy. numpy holds it, and it holds the buffer."""

    def __init__(self, buffer: TransferBuffer) -> None:
        self._buffer = buffer
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
        }
