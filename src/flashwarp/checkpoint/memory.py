"""The host cache's memory: one range of addresses, pinned piece by piece in the background.

Pinning 32 GiB takes about ten seconds. Each piece can be used as soon as it is pinned.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterator

from flashwarp.checkpoint.buffer import ALIGNMENT
from flashwarp.device import Device
from flashwarp.device.memory import Registration
from flashwarp.endings import Closing
from flashwarp.errors import DeviceError, DeviceOutOfMemory

__all__ = ["GrowingMemory"]

_log = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 20
_PIECES_MAX = 64

# linux/mman.h: backs the pages of a range with memory now. Since Linux 5.14.
_MADV_POPULATE_WRITE = 23


class GrowingMemory(Closing):
    """Host memory at one address, which becomes usable piece by piece.

    Parameters
    ----------
    device : Device
        Which GPU copies from and to it.
    nbytes : int
        Bytes in the end.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        piece = max(_PIECE_BYTES, nbytes // _PIECES_MAX)
        self.piece_bytes = piece // ALIGNMENT * ALIGNMENT
        try:
            self._map = mmap.mmap(-1, nbytes)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise DeviceOutOfMemory(f"reserving {nbytes} bytes of host memory: {error}") from error
        anchor = (ctypes.c_char * nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        # Holds the mapping until the last piece is unregistered.
        self._anchor: object | None = anchor
        self._registered: list[Registration] = []
        self._closed = False

    def grow(self, wanted: Callable[[], bool]) -> Iterator[int]:
        """Make the pieces usable, one after the other; yield the bytes of each."""
        for offset in range(0, self.nbytes, self.piece_bytes):
            if not wanted():
                return
            size = min(self.piece_bytes, self.nbytes - offset)
            if self._device.kind == "cuda":
                address = self.address + offset
                self._registered.append(self._device.register_host(address, size, False))
            else:
                self._populate(offset, size)
            yield size

    def _populate(self, offset: int, size: int) -> None:
        """Back a piece with memory now, so that no checkpoint has to."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, offset, size)
        except OSError as error:
            _log.debug("the host cache is backed with memory when it is first used: %s", error)

    def close(self) -> None:
        """Unpin and free it; no copy may use it any more. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for registration in reversed(self._registered):
            try:
                registration.close()
            except DeviceError as error:
                _log.info("unpinning failed: %s", error)
        self._anchor = None
        self._map.close()
