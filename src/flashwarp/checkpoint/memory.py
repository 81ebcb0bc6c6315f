"""The host cache's memory: one range of addresses, pinned piece by piece in the background.

Pinning 32 GiB takes about ten seconds. Each piece can be used as soon as it is pinned. Pieces are
small, and backed with memory before they are pinned: while the driver pins, all other calls of it
wait, the first checkpoint's too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from flashwarp.device import Device
from flashwarp.device.memory import Registration, align_up, host_only
from flashwarp.endings import Closing
from flashwarp.errors import DeviceError
from flashwarp.transfer import pool_of
from flashwarp.transfer.buffer import PIECE_BYTES

_log = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20
_PIECES_MAX = 1024
_PAGE_BYTES = 4096


class GrowingMemory(Closing):
    """Host memory at one address, which becomes usable piece by piece."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        # Pieces meet where copies are cut.
        self._piece_bytes = align_up(max(_PIECE_BYTES, nbytes // _PIECES_MAX), PIECE_BYTES)
        self._memory = host_only(device, nbytes, PIECE_BYTES)
        self.address = self._memory.address
        self._registered: list[Registration] = []

    def grow(self, wanted: Callable[[], bool]) -> Iterator[int]:
        """Make the pieces usable, one after the other; yield the bytes of each."""
        pool = pool_of(self._device)
        for offset in range(0, self.nbytes, self._piece_bytes):
            if not wanted():
                return
            size = min(self._piece_bytes, self.nbytes - offset)
            # Back it with memory now, so that neither a checkpoint nor the driver has to.
            self._memory.as_numpy()[offset : offset + size : _PAGE_BYTES] = 0
            if self._device.kind == "cuda":
                pinned = self._device.register_host(self.address + offset, size, False)
                self._registered.append(pool.count("checkpoint caches", pinned))
            yield size

    def close(self) -> None:
        """Unpin and free it; no copy may use it any more. May be called twice."""
        while self._registered:
            try:
                self._registered.pop().close()
            except DeviceError as error:
                _log.info("unpinning failed: %s", error)
        self._memory.close()
