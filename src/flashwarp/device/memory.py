"""Memory, registrations, streams and dense arrays of a device, each released once.

Closing a handle releases it; so does closing its device, or losing the handle.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import _native
from flashwarp.config import integer
from flashwarp.device.foreign import ArrayView, Place
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError, ClosedError, DeviceError, DeviceOutOfMemory

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True)
class MemoryInfo:
    """A device's memory in bytes: what can be allocated now, and all of it."""

    free_bytes: int
    total_bytes: int


Finalizer: TypeAlias = "weakref.finalize[..., Owned]"


class Home(Place, Protocol):
    """The device that memory belongs to, as far as memory needs it; every `Device` is one."""

    def _own(self, thing: Owned, release: Callable[[], None]) -> Finalizer: ...

    def own_stream(self) -> int:
        """Return the handle of the library's own stream."""

    def download_into(
        self, address: int, target: WriteableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        """Copy device memory into a contiguous host buffer; returns when it is there."""


class Owned(Closing):
    """Something of a device to be released once: by `close`, by its device, or when lost."""

    def __init__(self, device: Home, release: Callable[[], None]) -> None:
        self.device = device
        self._finalizer = device._own(self, release)

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Release it. May be called twice; may wait for running kernels."""
        self._finalizer()


class DeviceMemory(Owned):
    """Owner of one allocation; frees it when closed or lost.

    Attributes
    ----------
    address : int
        Its address for kernels, and, if it is host memory, for the host.
    nbytes : int
        Its size.
    on_host : bool
        Whether the host can touch it; then `as_numpy` works.
    writable : bool
        Whether kernels can store to it. False for another process's memory.
    """

    def __init__(
        self,
        device: Home,
        address: int,
        nbytes: int,
        release: Callable[[], None],
        on_host: bool,
        owners: list[object] | None = None,
    ) -> None:
        super().__init__(device, release)
        self.address = address
        self.nbytes = nbytes
        self.on_host = on_host
        self.writable = True
        self._owners = [] if owners is None else owners

    @property
    def owners(self) -> tuple[object, ...]:
        """Objects that keep the memory allocated while running code holds them.

        Empty on a GPU, where freeing waits for kernels, and after `close`.
        """
        return tuple(self._owners)

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """Return the bytes themselves, not a copy.

        The result keeps the memory allocated if the handle is lost. `close` frees pinned memory of
        a GPU all the same.
        """
        if not self.on_host:
            raise DeviceError(f"the host cannot touch memory of {self.device.name}: download it")
        return np.asarray(_HostBytes(self))

    def __repr__(self) -> str:
        where = "host" if self.on_host else self.device.name
        return f"DeviceMemory({self.nbytes} bytes at {self.address:#x}, {where})"


def host_only(device: Home, nbytes: int, alignment: int) -> DeviceMemory:
    """Map host memory that is zeros and takes no room until it is touched; not pinned."""
    try:
        memory = _native.HostMemory(positive(nbytes), alignment)
    except (MemoryError, TypeError) as error:  # TypeError: larger than the address space
        raise DeviceOutOfMemory(f"allocating {nbytes} bytes of host memory: {error}") from error
    owners: list[object] = [memory]
    return DeviceMemory(device, memory.address, nbytes, owners.clear, on_host=True, owners=owners)


class Exported(NamedTuple):
    """Device memory that other processes can map, to read it."""

    memory: DeviceMemory
    descriptor: int
    """What they map it by. The caller closes it."""
    offset: int
    """Where the memory begins in what they map."""


class _HostBytes:
    """The object that gives host memory to numpy. numpy holds it, and it holds the memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._held = (memory, memory.owners)
        self.__array_interface__ = {
            "version": 3,
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
        }


class Registration(Owned):
    """Existing host memory, pinned and reachable by kernels until closed.

    Attributes
    ----------
    owner : object
        What keeps the memory mapped until then, if its user lets that be this object.
    """

    owner: object = None

    def __init__(
        self, device: Home, address: int, nbytes: int, release: Callable[[], None]
    ) -> None:
        super().__init__(device, release)
        self.address = address
        self.nbytes = nbytes


class OwnedStream(Owned):
    """A stream that its owner closes. On a CPU device it is the device's only stream."""

    def __init__(self, device: Home, handle: int, release: Callable[[], None]) -> None:
        super().__init__(device, release)
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Serve the protocol by which other libraries take this stream: version and handle."""
        return 0, self.handle


class DeviceArray(Closing):
    """A dense array in a device's memory, for callers whose library cannot hold the result.

    Any library that knows `__cuda_array_interface__` takes it without a copy; `numpy.asarray`
    copies.

    Examples
    --------
    >>> import flashwarp.device
    >>> device = flashwarp.device.CpuDevice()
    >>> array = device.empty_array((2, 3), "float32")
    >>> array.copy_to_host().shape
    (2, 3)
    """

    def __init__(
        self,
        memory: DeviceMemory | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: Home,
        give_back: Callable[[DeviceMemory], None] | None = None,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        # The stream that fills the array. Libraries that take the array come after this stream.
        self.stream = device.own_stream()
        self._memory = memory
        self._give_back = give_back

    @property
    def address(self) -> int:
        """Where the data is; 0 for an array without elements."""
        if self._memory is None:
            return 0
        if self._memory.closed:
            raise ClosedError("the array was closed")
        return self._memory.address

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def copy_to_host(self) -> npt.NDArray[Any]:
        """Make a numpy array with the same content. Waits for the array's stream first."""
        result = np.empty(self.shape, self.dtype)
        if self.size:
            self.device.download_into(self.address, result, self.stream)
        return result

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("an array in device memory becomes a numpy array only by a copy")
        return self.copy_to_host().astype(dtype or self.dtype, copy=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.kind != "cuda":
            raise AttributeError("only arrays on a GPU have __cuda_array_interface__")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.address, False),
            "strides": None,
            "stream": self.stream or 1,
        }

    def __flashwarp_view__(self) -> ArrayView:
        return ArrayView(
            address=self.address,
            shape=self.shape,
            dtype=self.dtype,
            contiguous=True,
            device_kind=self.device.kind,
            ordinal=self.device.ordinal,
            library="other",
            owner=self,
            stream=self.stream if self.device.kind == "cuda" else None,
        )

    def close(self) -> None:
        """Free the memory, or give it back to the pool that lent it. May be called twice."""
        memory = self._memory
        if memory is None:
            return
        if self._give_back is None:
            memory.close()
        else:
            self._memory = None
            self._give_back(memory)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device.name!r})"


# Checks and views that devices share.


def positive(nbytes: int) -> int:
    """Check the size of an allocation."""
    if integer("nbytes", nbytes) <= 0:
        raise ArgumentError(f"cannot allocate {nbytes} bytes")
    return nbytes


def check_alignment(alignment: int) -> None:
    """Refuse what is not a power of two."""
    if integer("alignment", alignment) <= 0 or alignment & (alignment - 1):
        raise ArgumentError(f"alignment {alignment} is not a power of two")


def align_up(value: int, alignment: int) -> int:
    """Round up to a multiple of a power of two."""
    return (value + alignment - 1) & ~(alignment - 1)


def host_bytes(data: Any, *, writable: bool) -> npt.NDArray[np.uint8]:
    """View the bytes of a contiguous host buffer, not a copy."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError) as error:  # no buffer, or of a dtype that no buffer has
        raise ArgumentError(
            f"data of type {type(data).__name__}: {error}; an array of any dtype has its bytes as "
            'data.view("u1")'
        ) from error
    with view as buffer:
        if not buffer.c_contiguous:
            raise ArgumentError("the host buffer is not contiguous: copy it first")
        if writable and buffer.readonly:
            raise ArgumentError("the host buffer is read-only")
        if buffer.nbytes == 0:
            return np.empty(0, np.uint8)
    result: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    return result
