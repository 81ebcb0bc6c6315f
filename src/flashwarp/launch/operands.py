"""The operands of a call: row indices, the array that receives rows, and rows to store.

`Operands` takes arrays of any library, checks them, and copies to the device what it cannot reach.
Nothing here launches: a kernel, which the array launches, checks indices that lie on a GPU.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp.device import (
    ArrayView,
    Device,
    DeviceArray,
    OwnedStream,
    stream_handle,
)
from flashwarp.device.scratch import Scratch
from flashwarp.errors import ArgumentError, DeviceOutOfMemory, DtypeError, IndexDtypeError
from flashwarp.launch.rows import RowFormat, host_indices, plain_slice

# Libraries that can allocate a result on a GPU; callers of others get a `DeviceArray`.
_ALLOCATING = ("torch", "cupy")

_INDEX_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))


@dataclass(slots=True)
class Index:
    """Row indices where the kernel reads them."""

    address: int
    shape: tuple[int, ...]
    itemsize: int
    library: str
    owner: object
    checked: bool = True
    """False for indices on a GPU, whose values the host does not know."""
    held: DeviceArray | None = None
    """The copy in device memory of indices that came from the host."""

    def __len__(self) -> int:
        return math.prod(self.shape)

    def copy_from(self, device: Device, stream: object = None) -> npt.NDArray[Any]:
        """Copy them from a device to the host, as they are."""
        raw = device.download(self.address, len(self) * self.itemsize, stream)
        return np.frombuffer(raw, np.int32 if self.itemsize == 4 else np.int64)


@dataclass(slots=True)
class Rows:
    """Where rows go or come from. `held` is the copy in device memory of a host array."""

    address: int
    array: Any
    held: DeviceArray | None
    library: str = "numpy"

    def finish(self, stream: object) -> Any:
        """Return the array of rows read; if they must be copied to it, waits for `stream`."""
        if self.held is None:
            return self.array
        if stream is not None:
            self.held.stream = stream_handle(stream)
        copy = host_empty(self.held.shape, self.held.dtype)
        if copy.nbytes:
            self.held.device.download_into(self.held.address, copy, self.held.stream)
        self.held.close()
        if self.array is None:
            return copy
        here = isinstance(self.array, np.ndarray)
        np.copyto(self.array if here else np.from_dlpack(self.array), copy)
        return self.array

    def release(self) -> None:
        """Free the copy, once no kernel uses it."""
        if self.held is not None:
            self.held.close()


def is_foreign(key: object) -> bool:
    """Return whether this is an array of another library. The host may not reach its elements."""
    kind = type(key)
    if kind is np.ndarray:
        return False
    return (hasattr(kind, "__dlpack__") and not isinstance(key, np.ndarray | np.generic)) or (
        # Of the object: for a tensor of torch, the attribute takes microseconds.
        hasattr(key, "__cuda_array_interface__")
    )


def _is_stored(value: object) -> bool:
    """Return whether this is a `flashwarp.Array`: its elements are in a storage."""
    return hasattr(type(value), "kernel_handle")


def in_memory(operand: object) -> object:
    """Return an operand, or a copy of a `flashwarp.Array` in host memory."""
    return np.asarray(operand) if _is_stored(operand) else operand


def host_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate a numpy array; raises DeviceOutOfMemory, which names the size."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise DeviceOutOfMemory(
            f"{math.prod(shape) * dtype.itemsize} bytes of host memory for rows of shape {shape}: "
            "take fewer at a time, with slices, gather() or scatter()"
        ) from error


def host_index(chosen: range) -> npt.NDArray[np.int64]:
    """Make an index array of a range; raises as `host_empty` does."""
    index = host_empty((len(chosen),), np.dtype(np.int64))
    index[:] = chosen.step
    index[:1] = chosen.start
    return np.cumsum(index, out=index)


def rows_of(part: slice | range, length: int) -> range | npt.NDArray[np.int64]:
    """Return the rows of a slice or range: a range of neighbours, or indices, not yet checked."""
    if isinstance(part, slice):
        part = range(*plain_slice(part).indices(length))
    if part and not (0 <= part[0] < length and 0 <= part[-1] < length):
        return host_index(part)
    if not part:
        return range(0)  # which begins nowhere: `range(0)[::-1]` before the first row
    if part.step == 1 or len(part) < 2:
        return range(part.start, part.start + len(part))
    return host_index(part)


def _is_array(out: object) -> bool:
    """Return whether this has memory to write to. A view of anything else would be a copy."""
    if _is_stored(out):
        return False
    return isinstance(out, np.ndarray) or is_foreign(out) or hasattr(out, "__flashwarp_view__")


def _overlap(index: Index, view: ArrayView) -> bool:
    nbytes, index_bytes = view.nbytes, len(index) * index.itemsize
    apart = index.address + index_bytes <= view.address or view.address + nbytes <= index.address
    return not apart and nbytes != 0 and index_bytes != 0


@contextlib.contextmanager
def _typed_errors(values: object, dtype: np.dtype[Any]) -> Iterator[None]:
    """Turn the errors that numpy raises about values into typed ones."""
    if hasattr(values, "__cuda_array_interface__"):
        raise ArgumentError("the values are on a GPU: scatter(rows, values) stores them from there")
    try:
        yield
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # the last: of dates
        raise ArgumentError(f"values cannot be stored as {dtype}: {error}") from error
    except MemoryError as error:
        raise DeviceOutOfMemory(
            f"host memory has no room for the values as {dtype}: store fewer at a time"
        ) from error


@dataclass(frozen=True)
class Operands:
    """Checks the operands of one array's calls, and places them where its kernels reach them."""

    device: Device
    format: RowFormat
    memory: Device | Scratch
    """Where copies of host arrays are allocated."""
    stream: OwnedStream | None = None
    """The stream that orders these copies; default: the library's own."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's."""
        return self.format.dtype

    def copying_to(self, memory: Scratch, stream: OwnedStream) -> Operands:
        """Return the same checks, with other memory for copies and another stream."""
        return replace(self, memory=memory, stream=stream)

    def choose(self, idx: Any) -> range | Index:
        """Place row indices; those of a slice or range of neighbours need no place."""
        if isinstance(idx, slice | range):
            idx = rows_of(idx, self.format.row_count)
        return idx if isinstance(idx, range) else self.index(idx)

    def index(self, idx: Any) -> Index:
        """Place row indices. Those on the host are checked here; those on a GPU are not."""
        if not is_foreign(idx):
            return self._host_index(host_indices(idx, self.format.row_count), "numpy")
        view = self.device.view(idx)
        if view.dtype not in _INDEX_DTYPES:
            raise IndexDtypeError(f"indices of dtype {view.dtype}: use int64 or int32")
        if view.device_kind == self.device.kind and not view.contiguous:
            raise ArgumentError("the indices are not contiguous: copy them first")
        if view.device_kind == "cuda" and self.device.kind == "cuda":
            self._check_here("the indices are", view)
            itemsize = view.dtype.itemsize
            return Index(view.address, view.shape, itemsize, view.library, idx, checked=False)
        if view.device_kind == "cuda":
            raise ArgumentError("the indices are on a GPU, the array is on the CPU device")
        host = host_indices(np.from_dlpack(idx), self.format.row_count)
        return self._host_index(host, view.library)

    def _check_here(self, what: str, view: ArrayView) -> None:
        if view.ordinal not in (None, self.device.ordinal):
            raise ArgumentError(
                f"{what} on cuda:{view.ordinal}, the array is on {self.device.name}: copy them"
            )

    def _host_index(self, host: npt.NDArray[np.int64], library: str) -> Index:
        if self.device.kind == "cpu" or host.size == 0:
            return Index(host.ctypes.data, host.shape, 8, library, host)
        copy = self.memory.empty_array(host.shape, np.int64)
        self.device.upload(copy.address, np.ascontiguousarray(host), self.stream)
        return Index(copy.address, host.shape, 8, library, copy, held=copy)

    def target(
        self,
        out: Any,
        chosen: range | Index,
        stream: object = None,
    ) -> Rows:
        """Choose where chosen rows go: to `out`, or to a new array of the index's library.

        The new array is allocated in the order of `stream`; default: the library's current stream.
        Kernels read the index while they write the rows.
        """
        shape, library = self.place_of(chosen)
        on_gpu = self.device.kind == "cuda"
        if out is None:
            if not on_gpu and library in ("numpy", "other"):
                out = host_empty(shape, self.dtype)
                return Rows(out.ctypes.data, out, None)
            if on_gpu and library == "numpy":
                held = self.memory.empty_array(shape, self.dtype)
                return Rows(held.address, None, held)
            if on_gpu and library not in _ALLOCATING:
                out = self.device.empty_array(shape, self.dtype, self.stream)
            else:
                out = self.device.empty_like_library(library, shape, self.dtype, stream)
        elif not _is_array(out):
            raise ArgumentError(
                f"out is a {type(out).__name__}: rows go to an array of numpy or of a library with "
                "__cuda_array_interface__ or DLPack"
            )
        view = self.device.view(out)
        if view.shape != shape:
            raise ArgumentError(f"out has shape {view.shape}, the rows have {shape}")
        if view.dtype != self.dtype:
            raise DtypeError(f"out has dtype {view.dtype}, the array {self.dtype}")
        if not view.contiguous or view.read_only:
            raise ArgumentError("out must be contiguous and writable")
        if view.library == "torch" and out.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise ArgumentError(
                "out requires a gradient, and none flows through an array in a storage: use a "
                "tensor that does not require a gradient, or torch.no_grad()"
            )
        if isinstance(chosen, Index) and _overlap(chosen, view):
            raise ArgumentError(
                "out overlaps the indices, which kernels read while they write out: copy them"
            )
        if view.device_kind == "cpu" and on_gpu:
            held = self.memory.empty_array(shape, self.dtype)
            return Rows(held.address, out, held)
        if view.device_kind == "cuda" and not on_gpu:
            raise ArgumentError("out is on a GPU, the array is on the CPU device")
        self._check_here("the rows would be", view)
        return Rows(view.address, out, None, view.library)

    def place_of(self, chosen: range | Index) -> tuple[tuple[int, ...], str]:
        """Return the shape of chosen rows, and the library of the array that chooses them."""
        if isinstance(chosen, range):
            return self.format.shape_of(chosen), "numpy"
        return chosen.shape + self.format.row_shape, chosen.library

    # Values on the host.

    def host_values(self, values: object, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Broadcast values to a dense array of `shape`, cast as numpy's assignment casts."""
        with _typed_errors(values, self.dtype):
            given = np.asarray(values, self.dtype)
        view = self.broadcast(given, shape)
        if view.flags.c_contiguous:
            return view
        dense = host_empty(shape, self.dtype)
        dense[...] = view
        return dense

    def as_array(self, values: object) -> npt.NDArray[Any]:
        """Make an array of values. An array of numbers keeps its dtype until it is stored.

        Other values are cast here, because their casts may fail, and must fail before any store.
        """
        numbers = isinstance(values, np.ndarray) and values.dtype.kind in "biufc"
        with _typed_errors(values, self.dtype):
            return np.asarray(values, None if numbers else self.dtype)

    def broadcast(self, values: object, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Broadcast values to a view of `shape` as numpy's assignment does."""
        given = self.as_array(values)
        # Leading axes of one are dropped, but not for a scalar.
        while given.ndim > len(shape) >= 1 and given.shape[0] == 1:
            given = given[0]
        try:
            return np.broadcast_to(given, shape)
        except ValueError as error:
            raise ArgumentError(f"values do not broadcast to {shape}: {error}") from error

    def assign(self, held: npt.NDArray[Any], key: Any, values: object) -> None:
        """Store values to a host block, ``held[key] = values``."""
        with _typed_errors(values, self.dtype):
            held[key] = values

    def as_stored(self, values: object, shape: tuple[int, ...]) -> bool:
        """Return whether values lie in memory as rows of `shape` do."""
        return (
            isinstance(values, np.ndarray)
            and values.dtype == self.dtype
            and values.shape == shape
            and values.flags.c_contiguous
        )

    def source(self, values: object, chosen: range | Index) -> Rows:
        """Place rows to store. Does not wait for work that a GPU library has queued on them."""
        shape, _ = self.place_of(chosen)
        if hasattr(values, "__cuda_array_interface__"):
            view = self.device.view(values)
            if self.device.kind != "cuda":
                raise ArgumentError("the values are on a GPU, the array is on the CPU device")
            if view.shape != shape or view.dtype != self.dtype or not view.contiguous:
                raise ArgumentError(
                    f"values of shape {view.shape} and dtype {view.dtype} must be a contiguous "
                    f"array of shape {shape} and dtype {self.dtype}"
                )
            self._check_here("the values are", view)
            return Rows(view.address, values, None, view.library)
        return self.placed(self.host_values(values, shape))

    def placed(self, host: npt.NDArray[Any]) -> Rows:
        """Place a dense host array of the array's dtype where kernels read it."""
        if self.device.kind == "cpu" or host.nbytes == 0:
            return Rows(host.ctypes.data, host, None)
        held = self.memory.empty_array(host.shape, self.dtype)
        self.device.upload(held.address, host, self.stream)
        return Rows(held.address, host, held)
