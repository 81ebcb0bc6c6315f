"""A pool of device memory for the temporary arrays of asynchronous calls.

Freeing device memory waits for every kernel of the GPU, so calls that freed theirs would wait for
each other. They take it from this pool and give it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp.device import Device, DeviceArray, DeviceMemory, OwnedStream

_BLOCK_BYTES_MIN = 64 << 10

# The most that is kept between calls: two rounds of the largest built-in batch of a loader.
_KEPT_BYTES_MAX = 256 << 20


class Scratch:
    """Lends arrays in blocks of powers of two. Any thread may use it.

    Nothing runs on `stream` except the preparation of these blocks.
    """

    def __init__(self, device: Device, stream: OwnedStream) -> None:
        self._device = device
        self._stream = stream
        self._lock = endings.Lock()
        self._free: list[DeviceMemory] = []
        self._closed = False

    def empty_array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Lend an array, not zero-filled; its `close` gives it back."""
        shape, kind = tuple(shape), np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        block = self._take(nbytes) if nbytes else None
        return DeviceArray(block, shape, kind, self._device, self._give)

    def _take(self, nbytes: int) -> DeviceMemory:
        wanted = max(_BLOCK_BYTES_MIN, 1 << (nbytes - 1).bit_length())
        block = endings.holding([self._lock], partial(self._reuse, wanted))
        return self._device.allocate(wanted, self._stream) if block is None else block

    def _reuse(self, wanted: int) -> DeviceMemory | None:
        for i, block in enumerate(self._free):
            if block.nbytes == wanted:
                return self._free.pop(i)
        return None

    def _give(self, block: DeviceMemory) -> None:
        """Take a block back; free it if enough blocks are kept."""
        if not endings.holding([self._lock], partial(self._keep, block)):
            block.close()

    def _keep(self, block: DeviceMemory) -> bool:
        kept = sum(b.nbytes for b in self._free)
        if self._closed or kept + block.nbytes > _KEPT_BYTES_MAX:
            return False
        self._free.append(block)
        return True

    def close(self) -> None:
        """Free what is not lent; the rest is freed when it comes back. May be called twice."""
        with self._lock:
            self._closed = True
            blocks, self._free = self._free, []
        for block in blocks:
            block.close()
