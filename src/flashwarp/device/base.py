"""`Device`: the interface of a GPU or the CPU device: its memory, and what it owns.

A device owns what it allocates: closing it frees everything, in reverse. `kernels` and `streams`
have the rest of the interface.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.device.foreign import ArrayView, empty_in_library, view
from flashwarp.device.kernels import Kernels
from flashwarp.device.memory import (
    DeviceArray,
    DeviceMemory,
    Exported,
    Finalizer,
    MemoryInfo,
    Owned,
    Registration,
    host_bytes,
)
from flashwarp.device.streams import Streams
from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import CaptureError, ClosedError, DeviceError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


_log = logging.getLogger(__name__)


@renamed
class Device(Kernels, Streams, endings.Closing):
    """A place where kernels run. Use as a context manager, or close it; any thread may call.

    Attributes
    ----------
    name : str
        "cpu" or "cuda:N".
    kind : str
        "cpu" or "cuda".
    ordinal : int or None
        The GPU's number.
    """

    ordinal: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self._owned: dict[int, Finalizer] = {}
        self._owned_next = 0
        self._closed = False
        # By process, for `transfer.pool_of`.
        self.pools: dict[int, Any] = {}
        # Caches, which the device closes after its arrays.
        self.carries: weakref.WeakSet[endings.Closing] = weakref.WeakSet()

    # Memory. Copies run in the order of `stream`; default: the library's own stream.

    @abstractmethod
    def allocate(self, nbytes: int, stream: object = None) -> DeviceMemory:
        """Allocate device memory, zero-filled, aligned to at least 256 bytes.

        Raises DeviceOutOfMemory. Not during the capture of a CUDA graph.
        """

    @abstractmethod
    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        """Allocate host memory that kernels reach at the same address; pinned, zero-filled."""

    @abstractmethod
    def allocate_exported(self, nbytes: int) -> Exported:
        """Allocate device memory as `allocate` does, which other processes of the machine can read.

        Raises DeviceOutOfMemory, and DeviceError if the device cannot export memory.
        """

    @abstractmethod
    def map_exported(self, descriptor: int, nbytes: int) -> DeviceMemory:
        """Map memory that another process has allocated by `allocate_exported`, to read it.

        `nbytes` counts from where the other process begins to map it, its `offset` included. Raises
        SharedCacheError if the descriptor is of no such memory.
        """

    @property
    def identity(self) -> str:
        """A text that names the device in every process of the machine."""
        return self.name

    @abstractmethod
    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        """Make existing host memory reachable by kernels at its own address.

        The memory must stay mapped until the registration is closed.
        """

    def upload(
        self, address: int, data: ReadableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        """Copy contiguous host data to device memory; returns when `data` may be changed."""
        source = host_bytes(data, writable=False)
        self._copy_in(address, source.ctypes.data, source.nbytes, stream)

    def download_into(
        self, address: int, target: WriteableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        """Copy device memory into a contiguous host buffer; returns when the copy is done."""
        there = host_bytes(target, writable=True)
        self._copy_out(there.ctypes.data, address, there.nbytes, stream)

    @abstractmethod
    def _copy_in(self, target: int, source: int, nbytes: int, stream: object) -> None: ...

    @abstractmethod
    def _copy_out(self, target: int, source: int, nbytes: int, stream: object) -> None: ...

    @abstractmethod
    def fill(self, address: int, byte: int, nbytes: int, stream: object = None) -> None:
        """Set every byte; returns when done."""

    def clear(self, address: int, nbytes: int, stream: object) -> None:
        """Queue the zeroing of device memory, a multiple of 4 bytes. Returns at once."""
        raise NotImplementedError

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return how much memory can be allocated."""

    def download(self, address: int, nbytes: int, stream: object = None) -> bytes:
        """Return a copy of device memory."""
        target = bytearray(nbytes)
        self.download_into(address, target, stream)
        return bytes(target)

    def empty_array(
        self, shape: Sequence[int], dtype: npt.DTypeLike, stream: object = None
    ) -> DeviceArray:
        """Allocate a zero-filled array in device memory."""
        dtype = check_dtype(dtype)
        shape = check_shape(shape, dtype.itemsize)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self.allocate(nbytes, stream) if nbytes else None
        return DeviceArray(memory, shape, dtype, self)

    def empty_like_library(
        self, library: str, shape: Sequence[int], dtype: npt.DTypeLike, stream: object = None
    ) -> Any:
        """Allocate a result in the caller's library, in the device's memory.

        Parameters
        ----------
        library : str
            As in `ArrayView.library`.
        shape, dtype
            Of the result.
        stream : optional
            The stream that writes it first, if that is not the library's current one: the library
            may lend memory that another of its streams still uses.

        Returns
        -------
        array
            A torch tensor or cupy array on the device; a numpy array for the CPU; else a
            `DeviceArray`.
        """
        lengths, kind = tuple(int(n) for n in shape), np.dtype(dtype)
        made = empty_in_library(library, lengths, kind, self, stream)
        return self.empty_array(lengths, kind) if made is None else made

    @abstractmethod
    def describe(self) -> str:
        """Describe the device in one line for people: name, model, size."""

    def view(self, array: object) -> ArrayView:
        """Describe `array`. A DLPack producer on a GPU finishes before our stream goes on."""
        return view(array, stream=self.own_stream())

    # The end.

    def _own(self, thing: Owned, release: Callable[[], None]) -> Finalizer:
        return endings.holding([self._lock], functools.partial(self._note, thing, release))

    def _note(self, thing: Owned, release: Callable[[], None]) -> Finalizer:
        self._check_open()
        key = self._owned_next
        self._owned_next += 1
        finalizer = weakref.finalize(thing, _release, self._owned, key, release)
        # When the process ends, the system frees everything. A wait for a kernel that never ends
        # would keep the process from ending.
        finalizer.atexit = False
        self._owned[key] = finalizer
        return finalizer

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} is closed")

    def _check_usable(self) -> None:
        """Raise ClosedError, or in a forked child ForkError, if kernels cannot be launched."""
        self._check_open()

    def close(self) -> None:
        """Close the device's arrays and caches, then free all memory that it allocated.

        May be called twice. Blocks while arrays are flushed; raises at the end if a flush failed.
        """
        failure = endings.close_all(self)
        if isinstance(failure, CaptureError):
            raise failure  # graphs still use the memory
        for cache in list(self.carries):
            cache.close()
        endings.uninterrupted(self._release)
        if failure is not None:
            raise failure

    def _release(self) -> None:
        """Release everything; nothing is open on the device any more."""
        with self._lock:
            for finalizer in reversed(list(self._owned.values())):
                finalizer()
            self._closed = True
            self._built_in.clear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def _release(owned: dict[int, Finalizer], key: int, release: Callable[[], None]) -> None:
    owned.pop(key, None)
    quietly(release)


def quietly(release: Callable[[], None]) -> None:
    """Release something, and only log an error of the driver."""
    try:
        release()
    except DeviceError as error:
        # After a kernel's fault every call fails. The call that found the fault has raised it.
        _log.info("release failed: %s", error)
