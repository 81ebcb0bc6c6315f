"""The host cache's memory: one range of addresses, pinned piece by piece in the background.

Pinning 32 GiB takes about ten seconds. Each piece can be used as soon as it is pinned. Pieces are
small, and backed with memory before they are pinned: while the driver pins, all other calls of it
wait, the first checkpoint's too. Whoever closes it does not wait until all are given back: that
takes 0.6 ms for each, and the end of a registration waits for all work of the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from flashwarp import _waiting, endings
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
# For a pause in the work of a GPU, before a piece is given back.
_PAUSE_S = 0.05


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
        """Unpin and free it, in a thread; no copy may use it any more. May be called twice."""
        registered, self._registered = self._registered, []
        try:
            if registered:
                endings.Thread(self._give_back, "flashwarp-unpinning", registered).start()
                return
        except RuntimeError:  # the process has no thread left
            self._give_back(registered)
            return
        self._memory.close()

    def _give_back(self, registered: list[Registration]) -> None:
        """Unpin piece by piece, and free all then. A process that ends does it by itself."""
        while registered and not endings.ended() and not self._device._closed:
            _waiting.until(self._device.idle, _PAUSE_S)
            try:
                registered.pop().close()
            except DeviceError as error:
                _log.info("unpinning failed: %s", error)
        if not registered:
            self._memory.close()
