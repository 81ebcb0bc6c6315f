"""`KernelFile`: an open file as kernels hold it; mirrors `file/file_view.cuh`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from flashwarp.config import integer
from flashwarp.device.layouts import fields_of
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError, ClosedError, DtypeError

if TYPE_CHECKING:
    from flashwarp.array.array import Array
    from flashwarp.device import Device, DeviceMemory

LINES_AHEAD_MAX = 1 << 16
_READ, _WRITE = 1, 2


class FileStateStruct(ctypes.Structure):
    """Mirror of `fw::file_state`."""

    _fields_ = fields_of("file_state")


class FileStruct(ctypes.Structure):
    """Mirror of `fw::file`."""

    _fields_ = fields_of("file")


class KernelFile(Closing):
    """A file for kernels: pass it for a parameter of type `fw::file`.

    Kernels read and write it at byte offsets, append to it, and see its end. The bytes go through
    the cache of `array`. Close it before the array.

    Parameters
    ----------
    array : Array
        The file's bytes, of dtype uint8 and one axis, as long as the file's capacity. If it is not
        writable, kernels can only read.
    size : int, optional
        Bytes up to the end of the file. Default: the capacity. Writes and appends by kernels move
        the end, as far as the capacity.
    read_ahead : int
        Lines that reads start to fetch behind the ones that they need. None where the device reads
        the storage itself, which no fetch could hasten.

    Raises
    ------
    ArgumentError, DtypeError
        For an array that has no bytes on one axis, or a size above its capacity.
    """

    def __init__(self, array: Array, *, size: int | None = None, read_ahead: int = 0) -> None:
        if array.dtype != np.uint8:
            raise DtypeError(
                f"a file for kernels is an array of dtype uint8, this one has {array.dtype}: open "
                "the file with dtype=np.uint8"
            )
        if array.ndim != 1:
            raise ArgumentError(f"a file for kernels has one axis, the array has {array.ndim}")
        self.array = array
        self._ahead = integer("read_ahead", read_ahead, 0, LINES_AHEAD_MAX)
        self._fixed_size = integer("size", array.size if size is None else size, 0, array.size)
        state = FileStateStruct(self._fixed_size)
        self._state = array.device.allocate(ctypes.sizeof(state))
        array.device.upload(self._state.address, bytes(state))

    @property
    def capacity(self) -> int:
        """Bytes up to which kernels may write and append."""
        return self.array.size

    @property
    def size(self) -> int:
        """Bytes up to the end of the file. Waits for the launches so far, and raises as they do."""
        self._check_open()
        self.array.wait()
        return read_size(self.array.device, self._state)

    def pack(self) -> bytes:
        """Return the bytes of the `fw::file` that kernels take."""
        self._check_open()
        handle = bytes(self.array.kernel_handle)
        return bytes(
            FileStruct(
                bytes=tuple(handle),
                state=self._state.address,
                mode=_READ | (_WRITE if self.array.writable else 0),
                lines_ahead=self._ahead,
                fixed_size=self._fixed_size,
            )
        )

    def _check_open(self) -> None:
        if self._state.closed:
            raise ClosedError("the file for kernels was closed")

    def close(self) -> None:
        """Free its state, behind the launches that use it. May be called twice."""
        if not self._state.closed and not self.array.closed:
            self.array.wait()
        self._state.close()

    def __repr__(self) -> str:
        state = "closed" if self._state.closed else f"capacity {self.capacity}"
        return f"<KernelFile of {self.array!r}, {state}>"


def read_size(device: Device, state: DeviceMemory) -> int:
    """Return the size that the state of a file has, which launches may still move."""
    content = device.download(state.address, ctypes.sizeof(FileStateStruct))
    return int(FileStateStruct.from_buffer_copy(content).size)
