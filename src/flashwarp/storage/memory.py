"""Host memory as a storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp import _native
from flashwarp.config import flag, parse_bytes
from flashwarp.errors import (
    ArgumentError,
    DeviceOutOfMemory,
    DtypeError,
    ReadOnlyError,
)
from flashwarp.storage.base import Storage


class Memory(Storage):
    """Host memory as a namespace: a numpy array, or anything with the buffer protocol.

    Parameters
    ----------
    data : buffer or int
        The memory itself, kept alive and never copied. Or a size in bytes: allocate zeros.
    writable : bool, optional
        Default: whether the buffer is.

    Notes
    -----
    An array sees only stores that go through it. After you have written to the memory yourself,
    call the array's `drop_cache`. Until then the array may return the old bytes, or parts of both
    for a line that it read while you wrote. The same holds for stores through another `Memory` on
    the same bytes.
    """

    def __init__(self, data: Any, writable: bool | None = None) -> None:
        if isinstance(data, int | str):
            nbytes = parse_bytes(data)
            try:
                data = np.zeros(nbytes, np.uint8)
            except MemoryError as error:
                raise DeviceOutOfMemory(
                    f"{nbytes} bytes of host memory for a storage: give it fewer, or use a File"
                ) from error
        try:
            array: npt.NDArray[Any] = (
                data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
            )
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"data of type {type(data).__name__} is neither a size nor contiguous memory: "
                f"{error}"
            ) from error
        if array.dtype.hasobject:
            raise DtypeError("the memory holds Python objects, whose bytes are addresses")
        if not array.flags.c_contiguous:
            raise ArgumentError("the memory is not contiguous: copy it first")
        allowed = bool(array.flags.writeable) if writable is None else flag("writable", writable)
        if allowed and not array.flags.writeable:
            raise ReadOnlyError("the memory is read-only, so the storage cannot be writable")
        self.array = array
        self.address = int(array.ctypes.data)
        super().__init__(_native.MemoryStorage(self.address, array.nbytes, allowed, array))
