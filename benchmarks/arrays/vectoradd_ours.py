"""Vector addition through a cache: three arrays, wherever their bytes are, and the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import flashwarp as fw
from flashwarp.device import CudaDevice, Device
from flashwarp.program.compiling import Program

__all__ = ["ELEMENT_BYTES", "KERNELS", "TILE_BYTES", "Ours", "Tiled"]

KERNELS = Path(__file__).with_name("vectoradd.cu")
ELEMENT_BYTES = 8
TILE_BYTES = 16 << 20
"""Of a tile of each vector, by pipelines."""


class Ours:
    """Adds the first two of three arrays that share a cache, into the third."""

    def __init__(
        self, stack: ExitStack, device: Device, program: Program, arrays: Sequence[fw.Array]
    ) -> None:
        self._kernel = program["vector_add"]
        self._arrays = arrays
        line_bytes = arrays[0].cache.line_bytes
        self._line = line_bytes // ELEMENT_BYTES
        self._lines = -(-arrays[0].size // self._line)
        self._scratch = stack.enter_context(device.allocate(_warps_max(device) * line_bytes))

    def add(self, eager: bool) -> None:
        """Add, with nothing in the cache at the start; sums may still be in it at the end."""
        for array in self._arrays:
            array.drop_cache()
        self._kernel(*self._arrays, self._scratch, self._line, 0, int(eager), warps=self._lines)
        for array in self._arrays:
            array.synchronize()

    def flush(self) -> None:
        """Bring all sums to the storage, durable where it is a file."""
        self._arrays[-1].flush()


class Tiled:
    """Adds the same arrays by `Pipeline.tiles`: copies in, a kernel on plain memory, copies out."""

    def __init__(
        self, stack: ExitStack, device: Device, program: Program, arrays: Sequence[fw.Array],
        tile_bytes: int = TILE_BYTES,
    ) -> None:  # fmt: skip
        self._kernel = program["add_tile"]
        self._arrays = arrays
        self._rows = max(1, min(tile_bytes // ELEMENT_BYTES, arrays[0].size // 2))
        on_gpu = isinstance(device, CudaDevice)
        self._stream = stack.enter_context(device.create_stream()) if on_gpu else None

    def add(self) -> None:
        """Add; sums may still be in the cache of the CPU device at the end."""
        a, b, c = self._arrays
        for array in self._arrays:
            array.drop_cache()
        tiles = partial(fw.Pipeline.tiles, rows=self._rows, stream=self._stream)
        of_c = tiles(c, writable=True, read=False)
        for x, y, sums in zip(tiles(a), tiles(b), of_c, strict=True):
            n = len(sums)
            self._kernel(x, y, sums, n, warps=-(-n // 32), stream=self._stream)

    def flush(self) -> None:
        """Bring all sums to the storage, durable where it is a file."""
        self._arrays[-1].flush()

    def add_and_flush(self) -> None:
        """Do both."""
        self.add()
        self.flush()


def _warps_max(device: Device) -> int:
    # 2048 threads are the most that a multiprocessor of any GPU holds.
    return device.context.multiprocessors * 64 if isinstance(device, CudaDevice) else 64
