"""Arrays and streams of other libraries, which are inspected without importing these libraries.

`view` looks at an array of any library, `empty_in_library` allocates a result in the caller's
library, and `stream_handle` takes a stream in any common form. Nothing here copies array data.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashwarp._jit import driver
from flashwarp.errors import ArgumentError, DtypeError


class Place(Protocol):
    """The facts about a device that other libraries need to allocate on it."""

    name: str
    kind: str
    ordinal: int | None


# Streams.


@dataclass(frozen=True)
class Stream:
    """An order of work on a device. Streams of torch, cupy and cuda.core are taken in its place."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Serve the protocol by which other libraries take this stream: version and handle."""
        return 0, self.handle


# No stream lies below or past these. The driver reads at any other handle, stream or not.
_LEAST_ADDRESS = 4096
_ADDRESSES = 1 << 56


def stream_handle(stream: object) -> int:
    """Return the CUDA handle of a stream in any common form.

    Takes an int (0 or 1 is the legacy default stream, 2 the per-thread one), an object with
    `__cuda_stream__` (cuda.core and others), `cuda_stream` (torch) or `ptr` (cupy). None is 0.
    """
    if stream is None:
        return 0
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    else:
        handle = _foreign_stream_handle(stream)
    if not (0 <= handle <= 2 or _LEAST_ADDRESS <= handle < _ADDRESSES):
        raise ArgumentError(
            f"{handle} is not a CUDA stream handle: give 0, 1, 2 or the address of a stream"
        )
    return handle


def _foreign_stream_handle(stream: object) -> int:
    value = getattr(stream, "cuda_stream", None)
    if type(value) is int:
        return value
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method; in early cuda.core versions a property.
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ArgumentError(f"version {version} of __cuda_stream__ is not known, only 0")
        return int(handle)
    for name in ("cuda_stream", "ptr"):
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    raise ArgumentError(
        f"{type(stream).__name__} is not a CUDA stream: pass an int or a stream of torch, cupy or "
        "cuda.core"
    )


# Arrays of other libraries.

_LIBRARIES = {"torch": "torch", "cupy": "cupy", "numpy": "numpy", "numba": "numba"}
_LIBRARIES |= {"jax": "jax", "jaxlib": "jax"}


@dataclass(slots=True)
class ArrayView:
    """A description of an array of any library.

    Attributes
    ----------
    address : int
        Of the first element; valid while `owner` lives.
    shape, dtype
        As numpy has them.
    contiguous : bool
        Whether it is dense in C order; if not, `address` alone does not describe it.
    device_kind : str
        "cpu" or "cuda".
    ordinal : int or None
        The GPU's number, if the library has it.
    library : str
        "torch", "cupy", "numpy", "numba", "jax" or "other".
    owner : object
        Keeps the memory alive.
    read_only : bool
        Whether stores are forbidden.
    stream : int or None
        The stream on which the producer may still be writing, if it names one.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    contiguous: bool
    device_kind: str
    ordinal: int | None
    library: str
    owner: object = field(compare=False)  # arrays compare element by element
    read_only: bool = False
    stream: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize


def view(array: object, stream: object = None) -> ArrayView:
    """Describe an array without copying it.

    Takes numpy arrays, torch tensors, anything with `__cuda_array_interface__` or DLPack, and
    anything that numpy converts to an array (lists, numbers, buffers).

    Parameters
    ----------
    array : object
        The array.
    stream : object, optional
        A DLPack producer on a GPU finishes before later work on this stream. None: it need not.
    """
    library = _library_of(array)
    if library == "torch" and hasattr(array, "data_ptr"):
        return _view_torch(array)
    if hasattr(array, "__flashwarp_view__"):
        own: ArrayView = array.__flashwarp_view__()
        return own
    if isinstance(array, np.ndarray):
        return _view_numpy(array, array, "numpy")
    by_dlpack = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    # jax computes on streams of its own, and orders them by DLPack alone.
    if hasattr(array, "__cuda_array_interface__") and not (by_dlpack and library == "jax"):
        return _view_cuda(array, library)
    if by_dlpack:
        return _view_dlpack(array, library, stream)
    made: npt.NDArray[Any] = np.asarray(array)
    if made.dtype == object:
        raise DtypeError(f"{type(array).__name__} is not an array of numbers")
    return _view_numpy(made, made, "numpy")


def _library_of(array: object) -> str:
    return _LIBRARIES.get(type(array).__module__.partition(".")[0], "other")


def _view_numpy(array: npt.NDArray[Any], owner: object, library: str) -> ArrayView:
    return ArrayView(
        address=array.ctypes.data,
        shape=array.shape,
        dtype=array.dtype,
        contiguous=array.flags.c_contiguous,
        device_kind="cpu",
        ordinal=None,
        library=library,
        owner=owner,
        read_only=not array.flags.writeable,
    )


def _view_torch(tensor: Any) -> ArrayView:
    on_gpu = tensor.is_cuda
    if not on_gpu and tensor.device.type != "cpu":
        raise ArgumentError(
            f"a tensor on {tensor.device} cannot be used: only cpu and cuda tensors"
        )
    if not _is_strided(tensor.layout):
        raise ArgumentError(f"a tensor of layout {tensor.layout} cannot be used: make it dense")
    return ArrayView(
        tensor.data_ptr(),
        tuple(tensor.shape),
        _torch_dtype(tensor.dtype),
        tensor.is_contiguous(),
        "cuda" if on_gpu else "cpu",
        tensor.get_device() if on_gpu else None,
        "torch",
        tensor,
    )


# Of a few layouts and dtypes, each of which takes a microsecond to look at.


@functools.cache
def _is_strided(layout: object) -> bool:
    return str(layout).endswith("strided")


@functools.cache
def _torch_dtype(dtype: object) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError:
        raise DtypeError(
            f"{dtype} has no numpy dtype: pass an integer view, such as tensor.view(torch.uint8)"
        ) from None


def _view_cuda(array: Any, library: str) -> ArrayView:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise ArgumentError("masked arrays cannot be used")
    address, read_only = interface["data"]
    shape = tuple(int(n) for n in interface["shape"])
    dtype = np.dtype(interface["typestr"])
    ordinal = getattr(getattr(array, "device", None), "id", None)
    return ArrayView(
        address=int(address or 0),
        shape=shape,
        dtype=dtype,
        contiguous=_is_dense(shape, interface.get("strides"), dtype.itemsize),
        device_kind="cuda",
        ordinal=ordinal if isinstance(ordinal, int) else None,
        library=library,
        owner=array,
        read_only=bool(read_only),
        stream=interface.get("stream"),
    )


def _is_dense(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> bool:
    """Return whether byte strides are those of a dense C-order array."""
    if strides is None or math.prod(shape) == 0:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


# DLDeviceType of dlpack.h.
_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def _view_dlpack(array: Any, library: str, stream: object) -> ArrayView:
    kind, ordinal = array.__dlpack_device__()
    if int(kind) in _DLPACK_CPU:
        # numpy takes kDLCPU only; the host reads pinned memory in the same way.
        made = np.from_dlpack(array) if int(kind) == _DLPACK_CPU[0] else np.asarray(array)
        return _view_numpy(made, made, library)
    if int(kind) not in _DLPACK_CUDA:
        raise ArgumentError(f"an array on DLPack device type {int(kind)} cannot be used")
    exported = driver.dlpack_view(array, None if stream is None else stream_handle(stream))
    dtype = np.dtype(exported.dtype)
    strides = exported.strides
    byte_strides = None if strides is None else [n * dtype.itemsize for n in strides]
    return ArrayView(
        address=int(exported.ptr),
        shape=tuple(exported.shape),
        dtype=dtype,
        contiguous=_is_dense(tuple(exported.shape), byte_strides, dtype.itemsize),
        device_kind="cuda",
        ordinal=int(ordinal),
        library=library,
        owner=exported,
        read_only=bool(exported.readonly),
    )


def empty_in_library(
    library: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: Place,
    stream: object = None,
) -> Any:
    """Allocate an array of torch or cupy in a device's memory, or of numpy for the CPU.

    Returns None if neither library nor numpy can hold it. `Device.empty_like_library` describes
    the arguments.
    """
    module = sys.modules.get(library)
    handle = None if stream is None or device.kind != "cuda" else stream_handle(stream)
    if library == "torch" and module is not None:
        kind = torch_dtype(module, dtype)
        if handle is None or handle == module.cuda.current_stream(device.ordinal).cuda_stream:
            return module.empty(shape, dtype=kind, device=device.name)
        with module.cuda.stream(module.cuda.ExternalStream(handle, device=device.name)):
            return module.empty(shape, dtype=kind, device=device.name)
    if library == "cupy" and module is not None and device.kind == "cuda":
        with contextlib.ExitStack() as stack:
            stack.enter_context(module.cuda.Device(device.ordinal))
            if handle is not None:
                stack.enter_context(_cupy_stream(module, handle, device))
            return module.empty(shape, dtype)
    return np.empty(shape, dtype) if device.kind == "cpu" else None


def _cupy_stream(cupy: Any, handle: int, device: Place) -> Any:
    """Wrap a stream for cupy; versions of cupy differ in how they take one."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(Stream(handle))
    return cupy.cuda.ExternalStream(handle, device.ordinal)


def torch_dtype(torch: Any, dtype: np.dtype[Any]) -> Any:
    """Return torch's dtype for numpy's."""
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype) or not dtype.isnative:
        raise DtypeError(f"torch has no dtype for {dtype.str} ({dtype.name})")
    return found
