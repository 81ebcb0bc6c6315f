"""The buffers of a pipeline, in device memory, which its batches use in turn."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from flashwarp.array.array import Array
from flashwarp.config import choice
from flashwarp.device import DeviceArray, DeviceMemory
from flashwarp.errors import ArgumentError, CaptureError

# Libraries that allocate their own arrays on a GPU; callers of others get a `DeviceArray`.
_ALLOCATING = ("torch", "cupy")


class Buffer(NamedTuple):
    """Where one batch goes."""

    rows: Any
    """The array of its rows, of the library of its ids."""
    address: int
    library: str

    def on(self, stream: int) -> Any:
        """Return the rows for work on a stream, which other libraries and copies come after."""
        if isinstance(self.rows, DeviceArray) and self.rows.device.kind == "cuda":
            self.rows.stream = stream
        return self.rows


class Buffers:
    """So many buffers of so many rows of an array, for each library whose ids have been seen."""

    def __init__(self, array: Array, batch_rows: int, count: int) -> None:
        self._array = array
        self._shape = (batch_rows, *array.shape[1:])
        self._count = count
        self._turn = 0
        self._of: dict[str, list[tuple[Any, int]]] = {}
        self.library = "numpy"
        """The library of the last batch."""

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self._shape[0] * self._array._format.row_bytes

    def take(self, library: str, rows: int, stream: int) -> Buffer:
        """Return the next buffer, cut to so many rows; `keep` makes the one after it the next.

        Raises CaptureError if the buffers must be allocated while `stream` is being captured.
        """
        library = library if library in _ALLOCATING else "numpy"
        pool = self._of.get(library)
        if pool is None:
            if self._array.device.capture(stream) is not None:
                raise CaptureError(
                    "the buffers of this pipeline are not allocated yet, and memory that a capture "
                    "allocates is the graph's: prefetch and take a batch of such ids before"
                )
            pool = self._of[library] = [self._make(library) for _ in range(self._count)]
        whole, address = pool[self._turn % self._count]
        self.library = library
        if isinstance(whole, DeviceArray):
            return Buffer(self._cut(whole, rows), address, library)
        return Buffer(whole[:rows], address, library)

    def keep(self) -> None:
        """Go on: the buffer that was taken is in use."""
        self._turn += 1

    def _make(self, library: str) -> tuple[Any, int]:
        device = self._array.device
        made: Any
        if device.kind == "cuda" and library == "numpy":
            made = device.empty_array(self._shape, self._array.dtype)
        else:
            made = device.empty_like_library(library, self._shape, self._array.dtype)
        return made, device.view(made).address if self.nbytes else 0

    def _cut(self, whole: DeviceArray, rows: int) -> DeviceArray:
        """Return the first rows; closing them frees nothing."""
        shape = (rows, *self._shape[1:])
        memory = whole._memory if rows else None
        return DeviceArray(memory, shape, whole.dtype, whole.device, _keep_memory)

    def close(self) -> None:
        """Free what no other library owns. No batch may be in flight."""
        for pool in self._of.values():
            for whole, _ in pool:
                if isinstance(whole, DeviceArray):
                    whole.close()
        self._of.clear()


def imported(library: str) -> str:
    """Return the name of a library of which buffers are arrays; "" is that of the ids."""
    choice("library", library, ("", "numpy", "torch", "cupy"))
    if library and library not in sys.modules:
        raise ArgumentError(f"library={library!r} is not imported, and buffers are arrays of it")
    return library


def library_of(array: object) -> str:
    """Return "torch" or "cupy" for their arrays, else ""."""
    name = type(array).__module__.partition(".")[0]
    return name if name in _ALLOCATING else ""


def _keep_memory(memory: DeviceMemory) -> None:
    del memory
