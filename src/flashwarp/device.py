"""Where kernels run: `CpuDevice` and `CudaDevice`, their memory, launches and streams.

A device owns what it allocates: closing it frees all of it, in reverse. Waits have a time limit.
Arrays of other libraries are looked at through `view` and never imported; importing this file
imports neither CUDA nor any array library but numpy.
"""

# The methods of a device are documented in `Device`, and some devices need not all their arguments.
# ruff: noqa: ARG002, D102
from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import math
import mmap
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from flashwarp._foreign import ArrayView, empty_like_library, stream_handle, view
from flashwarp._jit import compiler, driver
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    ForkError,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "ArrayView",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceArray",
    "DeviceMemory",
    "Event",
    "MemoryInfo",
    "Registration",
    "Stream",
    "empty_like_library",
    "resolve",
    "stream_handle",
    "view",
]

_log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Default limit of a wait for a stream. An honest launch moves at most one cache-full of data:
100 GiB at 3 GB/s take 36 s."""

_WARP_THREADS = 32
# Transparent huge pages come in this size, and so do the largest alignments anybody asks for.
_HUGE_PAGE_BYTES = 2 << 20


# What a device hands out.


@dataclass(frozen=True)
class MemoryInfo:
    """A device's memory in bytes: what can be allocated now, and all of it."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Stream:
    """An order of work on a device. Streams of torch, cupy and cuda.core are taken in its place."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Serve the protocol by which other libraries take this stream: version and handle."""
        return 0, self.handle


class _Owned:
    """Something of a device to be released once: by `close`, by its device, or when lost."""

    def __init__(self, device: Device, release: Callable[[], None]) -> None:
        self.device = device
        self._finalizer = device._own(self, release)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Release it. May be called twice; may wait for running kernels."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class DeviceMemory(_Owned):
    """Owner of one allocation; frees it when closed or lost.

    Attributes
    ----------
    address : int
        Where kernels, and for host memory also the host, find it.
    nbytes : int
        Its size.
    on_host : bool
        Whether the host can touch it; then `as_numpy` works.
    """

    def __init__(
        self, device: Device, address: int, nbytes: int, release: Callable[[], None], on_host: bool
    ) -> None:
        super().__init__(device, release)
        self.address = address
        self.nbytes = nbytes
        self.on_host = on_host

    def as_numpy(self) -> npt.NDArray[np.uint8]:
        """Return the bytes themselves, not a copy.

        The result keeps the memory from being lost, but not from `close`.
        """
        if not self.on_host:
            raise DeviceError(f"the host cannot touch memory of {self.device.name}: download it")
        return np.asarray(_HostBytes(self))

    def __repr__(self) -> str:
        where = "host" if self.on_host else self.device.name
        return f"DeviceMemory({self.nbytes} bytes at {self.address:#x}, {where})"


class _HostBytes:
    """What numpy takes host memory from; numpy keeps it, and it keeps the memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
        }


class Registration(_Owned):
    """Host memory of somebody else, pinned and reachable by kernels until closed."""

    def __init__(
        self, device: Device, address: int, nbytes: int, release: Callable[[], None]
    ) -> None:
        super().__init__(device, release)
        self.address = address
        self.nbytes = nbytes


class Event(ABC):
    """A point in a stream, to wait for or to measure between."""

    @abstractmethod
    def record(self, stream: object = None) -> None:
        """Move the event to the present end of the stream."""

    @abstractmethod
    def done(self) -> bool:
        """Tell whether the work before the event has ended."""

    @abstractmethod
    def elapsed_ms(self, start: Self) -> float:
        """Return the milliseconds from `start` to this event, both done."""

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Block until done; raises DeviceTimeout."""
        driver.wait_until(self.done, timeout_s, "the event")


class DeviceArray:
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
        device: Device,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        # The stream whose work fills the array; libraries that take it order themselves after it.
        self.stream = device.default_stream().handle
        self._memory = memory

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
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def copy_to_host(self) -> npt.NDArray[Any]:
        """Make a numpy array with the same content. Waits for the array's stream first."""
        result = np.empty(self.shape, self.dtype)
        if self.size:
            self.device.synchronize(self.stream)
            self.device.download_into(self.address, result)
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
            ordinal=self.device.ordinal if isinstance(self.device, CudaDevice) else None,
            library="other",
            owner=self,
            stream=self.stream if self.device.kind == "cuda" else None,
        )

    def close(self) -> None:
        """Free the memory. May be called twice."""
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device.name!r})"


# The device.


class Device(ABC):
    """A place where kernels run. Use as a context manager, or close it; any thread may call.

    Attributes
    ----------
    name : str
        "cpu" or "cuda:N".
    kind : str
        "cpu" or "cuda".
    """

    name: str
    kind: str

    def __init__(self) -> None:
        self._owned: dict[int, weakref.finalize[Any, Any]] = {}
        self._owned_next = 0
        self._lock = threading.RLock()
        self._closed = False

    # Memory.

    @abstractmethod
    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate device memory, zero-filled, aligned to at least 256 bytes.

        Raises DeviceOutOfMemory. Not during the capture of a CUDA graph.
        """

    @abstractmethod
    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        """Allocate host memory that kernels reach at the same address; pinned, zero-filled."""

    @abstractmethod
    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        """Make existing host memory reachable by kernels at its own address.

        The memory must stay mapped until the registration is closed.
        """

    @abstractmethod
    def upload(self, address: int, data: ReadableBuffer | npt.NDArray[Any]) -> None:
        """Copy contiguous host data to device memory; returns when `data` may be changed."""

    @abstractmethod
    def download_into(self, address: int, target: WriteableBuffer | npt.NDArray[Any]) -> None:
        """Copy device memory into a contiguous host buffer; returns when it is there."""

    @abstractmethod
    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set every byte; returns when done."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return what can be allocated."""

    def download(self, address: int, nbytes: int) -> bytes:
        """Return a copy of device memory."""
        target = bytearray(nbytes)
        self.download_into(address, target)
        return bytes(target)

    def empty_array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Allocate a zero-filled array in device memory."""
        shape, dtype = tuple(int(n) for n in shape), np.dtype(dtype)
        if min(shape, default=0) < 0:
            raise ArgumentError(f"shape {shape} has a negative length")
        nbytes = math.prod(shape) * dtype.itemsize
        return DeviceArray(self.allocate(nbytes) if nbytes else None, shape, dtype, self)

    # Kernels and streams.

    @abstractmethod
    def launch(
        self,
        name: str,
        params: ctypes.Structure | bytes,
        *,
        warps: int,
        block_threads: int = 256,
        max_blocks: int | None = None,
        stream: object = None,
        serve: Sequence[int] = (),
    ) -> None:
        """Launch the built-in kernel `fw_<name>`, whose one parameter is a struct by value.

        Parameters
        ----------
        name : str
            Without the prefix.
        params : ctypes.Structure or bytes
            The struct, copied before this returns.
        warps : int
            How many warps have something to do. The launch is never larger than what the device
            runs at a time, so kernels loop. None or fewer: nothing is launched.
        block_threads : int
            Threads of a block, a multiple of 32.
        max_blocks : int, optional
            A smaller limit on the blocks.
        stream : object, optional
            Where it is queued; see `stream_handle`. Default: the library's own stream.
        serve : sequence of int
            Addresses of software controllers whose work waiting CPU threads do.

        Notes
        -----
        Returns at once on a GPU, when done on the CPU.
        """

    @abstractmethod
    def default_stream(self) -> Stream:
        """Return the library's own stream, which does not wait for the legacy default stream."""

    @abstractmethod
    def current_stream(self, library: str) -> Stream:
        """Return the stream that a library ("torch", "cupy", ...) uses on this device now."""

    @abstractmethod
    def order(self, before: object, after: object) -> None:
        """Make what is queued on stream `after` from now on wait for what `before` has queued."""

    @abstractmethod
    def synchronize(self, stream: object = None, timeout_s: float = TIMEOUT_S) -> None:
        """Block until one stream is done, and waits for no other; raises DeviceTimeout."""

    @abstractmethod
    def event(self) -> Event:
        """Create an event that can measure time."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the device in one line for people: name, model, size."""

    def view(self, array: object) -> ArrayView:
        """Tell what `array` is and where; a DLPack producer is made to finish for our stream."""
        return view(array, stream=self.default_stream())

    # The end.

    def _own(self, thing: _Owned, release: Callable[[], None]) -> weakref.finalize[Any, Any]:
        with self._lock:
            self._check_open()
            key = self._owned_next
            self._owned_next += 1
            finalizer = weakref.finalize(thing, _release, self._owned, key, release)
            # When the process ends, the system takes everything back, and a wait for a kernel that
            # never ends would keep it from ending.
            finalizer.atexit = False
            self._owned[key] = finalizer
        return finalizer

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} is closed")

    def close(self) -> None:
        """Release everything the device has handed out. May be called twice."""
        with self._lock:
            for finalizer in reversed(list(self._owned.values())):
                finalizer()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def _release(owned: dict[int, Any], key: int, release: Callable[[], None]) -> None:
    owned.pop(key, None)
    _quietly(release)


def _quietly(release: Callable[[], None]) -> None:
    try:
        release()
    except DeviceError as error:
        # After a kernel's fault every call fails; the fault itself was raised where it was found.
        _log.warning("release failed: %s", error)


def _positive(nbytes: int) -> int:
    if nbytes <= 0:
        raise ArgumentError(f"cannot allocate {nbytes} bytes")
    return nbytes


def _check_alignment(alignment: int) -> None:
    if alignment <= 0 or alignment & (alignment - 1):
        raise ArgumentError(f"alignment {alignment} is not a power of two")


def _align_up(value: int, alignment: int) -> int:
    return (value + alignment - 1) & ~(alignment - 1)


def _host_bytes(data: Any, *, writable: bool) -> npt.NDArray[np.uint8]:
    """View the bytes of a contiguous host buffer, not a copy."""
    with memoryview(data) as buffer:
        if not buffer.c_contiguous:
            raise ArgumentError("the host buffer is not contiguous: copy it first")
        if writable and buffer.readonly:
            raise ArgumentError("the host buffer is read-only")
        if buffer.nbytes == 0:
            return np.empty(0, np.uint8)
    result: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    return result


# The CPU as a device.


class CpuDevice(Device):
    """Runs the same kernels on host threads, a warp being one thread.

    Parameters
    ----------
    threads : int, optional
        Default: every core this process may use.
    """

    name = "cpu"
    kind = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        self.threads = len(os.sched_getaffinity(0)) if threads is None else threads
        if self.threads < 1:
            raise ArgumentError(f"a CPU device needs at least one thread, not {threads}")
        self._pid = os.getpid()

    @functools.cached_property
    def _pool(self) -> Any:
        try:
            native = importlib.import_module("flashwarp._native")
        except ImportError as error:
            raise DeviceError(
                f"flashwarp's native part cannot be imported ({error}): install the wheel again"
            ) from error
        return native.CpuPool(self.threads)

    def allocate(self, nbytes: int) -> DeviceMemory:
        return self.allocate_host(nbytes, _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else 4096)

    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        _check_alignment(alignment)
        slack = alignment if alignment > mmap.PAGESIZE else 0
        try:
            mapping = mmap.mmap(
                -1, _positive(nbytes) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise DeviceOutOfMemory(f"allocating {nbytes} bytes of host memory: {error}") from error
        if nbytes >= _HUGE_PAGE_BYTES:
            # Random lines of a large cache miss the TLB on almost every access with 4 KiB pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return DeviceMemory(self, _align_up(base, alignment), nbytes, mapping.close, on_host=True)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        return Registration(self, address, _positive(nbytes), lambda: None)

    def upload(self, address: int, data: ReadableBuffer | npt.NDArray[Any]) -> None:
        source = _host_bytes(data, writable=False)
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def download_into(self, address: int, target: WriteableBuffer | npt.NDArray[Any]) -> None:
        destination = _host_bytes(target, writable=True)
        ctypes.memmove(destination.ctypes.data, address, destination.nbytes)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def memory_info(self) -> MemoryInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        with Path("/proc/meminfo").open() as file:
            fields = dict(line.split(":", 1) for line in file)
        # "MemAvailable:   123456 kB": what could be used without swapping, page cache included.
        available = int(fields["MemAvailable"].split()[0]) << 10
        return MemoryInfo(available, total)

    def launch(
        self,
        name: str,
        params: ctypes.Structure | bytes,
        *,
        warps: int,
        block_threads: int = 256,
        max_blocks: int | None = None,
        stream: object = None,
        serve: Sequence[int] = (),
    ) -> None:
        self._check_open()
        if os.getpid() != self._pid:
            raise ForkError(
                f"this CPU device belongs to process {self._pid}: a forked child must open its own"
            )
        if warps <= 0:
            return
        try:
            self._pool.launch(f"fw_{name}", bytes(params), min(warps, self.threads), list(serve))
        except (KeyError, ValueError) as error:
            raise ArgumentError(f"launch of {name} on the CPU: {error.args[0]}") from error

    def close(self) -> None:
        """Ends the threads and releases everything. May be called twice."""
        with self._lock:
            # Waits for a running launch. A forked child has none of its parent's threads.
            if "_pool" in self.__dict__ and os.getpid() == self._pid:
                self._pool.close()
            super().close()

    def default_stream(self) -> Stream:
        return Stream(0)

    def current_stream(self, library: str) -> Stream:
        return Stream(0)

    def order(self, before: object, after: object) -> None:
        pass

    def synchronize(self, stream: object = None, timeout_s: float = TIMEOUT_S) -> None:
        pass

    def event(self) -> Event:
        return _CpuEvent()

    def describe(self) -> str:
        return f"cpu ({self.threads} threads)"


class _CpuEvent(Event):
    """Launches on the CPU end before they return, so an event is the time of its record."""

    def __init__(self) -> None:
        self._recorded_ns = 0

    def record(self, stream: object = None) -> None:
        self._recorded_ns = time.perf_counter_ns()

    def done(self) -> bool:
        return True

    def elapsed_ms(self, start: Event) -> float:
        if not isinstance(start, _CpuEvent):
            raise ArgumentError("both events must come from one device")
        return (self._recorded_ns - start._recorded_ns) * 1e-6


# A GPU.


class CudaDevice(Device):
    """A GPU, in the primary context that it shares with torch and others.

    Parameters
    ----------
    ordinal : int
        Its number among the GPUs that CUDA_VISIBLE_DEVICES leaves.

    Notes
    -----
    Kernels are compiled, or found on disk, and loaded completely when the first is launched.
    """

    kind = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__()
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.context = driver.Context(ordinal)
        self._stream = Stream(self.context.create_stream())

    @functools.cached_property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, such as "sm_90"."""
        return compiler.architecture(self.context.compute_capability)

    # Memory.

    def allocate(self, nbytes: int) -> DeviceMemory:
        address = self.context.allocate(_positive(nbytes))
        release = functools.partial(_if_usable, self.context, self.context.free, address)
        memory = DeviceMemory(self, address, nbytes, release, on_host=False)
        self.fill(address, 0, nbytes)
        return memory

    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        _check_alignment(alignment)
        # The driver cuts small allocations out of one page, so none of them is aligned by itself.
        slack = alignment
        base = self.context.allocate_host(_positive(nbytes) + slack)
        release = functools.partial(_if_usable, self.context, self.context.free_host, base)
        ctypes.memset(base, 0, nbytes + slack)
        return DeviceMemory(self, _align_up(base, alignment), nbytes, release, on_host=True)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        self.context.register_host(address, _positive(nbytes), read_only)
        release = functools.partial(_if_usable, self.context, self.context.unregister_host, address)
        return Registration(self, address, nbytes, release)

    def upload(self, address: int, data: ReadableBuffer | npt.NDArray[Any]) -> None:
        source = _host_bytes(data, writable=False)
        if source.nbytes:
            # A copy of pageable memory blocks in the driver until the work before it is done,
            # without a time limit; so that work is waited for here, with one.
            self.synchronize()
            self.context.copy_to_device(
                address, source.ctypes.data, source.nbytes, self._stream.handle
            )
            self.synchronize()

    def download_into(self, address: int, target: WriteableBuffer | npt.NDArray[Any]) -> None:
        destination = _host_bytes(target, writable=True)
        if destination.nbytes:
            # A copy of pageable memory blocks in the driver until the work before it is done,
            # without a time limit; so that work is waited for here, with one.
            self.synchronize()
            self.context.copy_to_host(
                destination.ctypes.data, address, destination.nbytes, self._stream.handle
            )
            self.synchronize()

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            self.context.fill(address, byte, nbytes, self._stream.handle)
            self.synchronize()

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(*self.context.memory_info())

    # Kernels.

    @functools.cached_property
    def artifact(self) -> compiler.Artifact:
        """The compiled built-in kernels with their resources."""
        return compiler.compile_module(self.arch)

    @functools.cached_property
    def _module(self) -> driver.Module:
        return driver.Module(self.context, self.artifact.cubin, tuple(self.artifact.kernels))

    def load(self) -> None:
        """Compile and load all built-in kernels, which the first launch does otherwise."""
        with self._lock:
            self._check_open()
            _ = self._module

    def grid(
        self, name: str, *, warps: int, block_threads: int = 256, max_blocks: int | None = None
    ) -> int:
        """How many blocks `launch` uses for this kernel with these arguments."""
        if block_threads <= 0 or block_threads % _WARP_THREADS:
            raise ArgumentError(f"block_threads={block_threads} is not a positive multiple of 32")
        useful = -(-warps * _WARP_THREADS // block_threads)
        resident = self._resident_blocks(name, block_threads)
        return max(0, min(useful, resident, resident if max_blocks is None else max_blocks))

    def _resident_blocks(self, name: str, block_threads: int) -> int:
        """How many blocks of a kernel the whole GPU holds at a time."""
        kernel = self._kernel(name)
        blocks = self._module.resident_blocks(kernel, block_threads)
        if blocks == 0:
            raise DeviceError(
                f"kernel {kernel.name} cannot run with {block_threads} threads a block: it uses "
                f"{kernel.registers} registers and allows {kernel.threads_max} threads"
            )
        return blocks * self.context.multiprocessors

    def _kernel(self, name: str) -> driver.Kernel:
        self.load()
        kernel = self._module.kernels.get(f"fw_{name}")
        if kernel is None:
            known = ", ".join(sorted(self._module.kernels))
            raise ArgumentError(f"there is no kernel fw_{name}; the module has: {known}")
        return kernel

    def launch(
        self,
        name: str,
        params: ctypes.Structure | bytes,
        *,
        warps: int,
        block_threads: int = 256,
        max_blocks: int | None = None,
        stream: object = None,
        serve: Sequence[int] = (),
    ) -> None:
        blocks = self.grid(name, warps=warps, block_threads=block_threads, max_blocks=max_blocks)
        kernel = self._kernel(name)
        struct = bytes(params)
        expected = self.artifact.kernels[kernel.name].param_bytes
        if len(struct) != expected:
            raise DeviceError(
                f"kernel {kernel.name} takes a struct of {expected} bytes, but the host's has "
                f"{len(struct)}: their layouts differ"
            )
        if blocks:
            self.context.launch(kernel, blocks, block_threads, struct, self._handle(stream))

    # Streams.

    def _handle(self, stream: object) -> int:
        return self._stream.handle if stream is None else stream_handle(stream)

    def default_stream(self) -> Stream:
        return self._stream

    def current_stream(self, library: str) -> Stream:
        module = sys.modules.get(library)
        if library == "torch" and module is not None:
            return Stream(int(module.cuda.current_stream(self.ordinal).cuda_stream))
        if library == "cupy" and module is not None:
            with module.cuda.Device(self.ordinal):
                return Stream(int(module.cuda.get_current_stream().ptr))
        return self._stream

    def order(self, before: object, after: object) -> None:
        first, second = self._handle(before), self._handle(after)
        if first == second:
            return
        event = self.context.create_event(timing=False)
        try:
            self.context.record_event(event, first)
            self.context.stream_wait_event(second, event)
        finally:
            # The driver keeps a destroyed event until the streams have passed it.
            self.context.destroy_event(event)

    def synchronize(self, stream: object = None, timeout_s: float = TIMEOUT_S) -> None:
        handle = self._handle(stream)
        done = functools.partial(self.context.stream_done, handle)
        driver.wait_until(done, timeout_s, f"stream {handle:#x} of {self.name}")

    def event(self) -> Event:
        return _CudaEvent(self)

    def describe(self) -> str:
        major, minor = self.context.compute_capability
        gib = self.memory_info().total_bytes / (1 << 30)
        return (
            f"{self.name} ({self.context.model}, compute capability {major}.{minor}, "
            f"{self.context.multiprocessors} multiprocessors, {gib:.0f} GiB)"
        )

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for the library's stream, then release everything. May be called twice.

        When the stream does not end in time, nothing is released and DeviceTimeout is raised:
        freeing memory under a running kernel would wait without a limit.
        """
        with self._lock:
            if self._closed:
                return
            if self.context.usable:
                self._wait_before_close(timeout_s)
            super().close()
            if self.context.usable:
                self._close_context()

    def _wait_before_close(self, timeout_s: float) -> None:
        try:
            self.synchronize(timeout_s=timeout_s)
        except DeviceTimeout:
            raise
        except DeviceError as error:
            _log.warning("closing %s after a fault: %s", self.name, error)

    def _close_context(self) -> None:
        if "_module" in self.__dict__:
            _quietly(self._module.close)
        _quietly(functools.partial(self.context.destroy_stream, self._stream.handle))
        _quietly(self.context.close)


def _if_usable(context: driver.Context, call: Callable[..., None], *arguments: int) -> None:
    """In a forked child the parent's memory is not ours to free."""
    if context.usable:
        call(*arguments)


class _CudaEvent(Event, _Owned):
    def __init__(self, device: CudaDevice) -> None:
        self._context = device.context
        self._cuda = device
        self._event = self._context.create_event(timing=True)
        release = functools.partial(
            _if_usable, self._context, self._context.destroy_event, self._event
        )
        _Owned.__init__(self, device, release)

    def record(self, stream: object = None) -> None:
        self._context.record_event(self._event, self._cuda._handle(stream))

    def done(self) -> bool:
        return self._context.event_done(self._event)

    def elapsed_ms(self, start: Event) -> float:
        if not isinstance(start, _CudaEvent) or start.device is not self.device:
            raise ArgumentError("both events must come from one device")
        return self._context.elapsed_ms(start._event, self._event)


# Which device.

_opened: dict[str, Device] = {}
_opened_lock = threading.Lock()


def resolve(device: object = None) -> Device:
    """Return the device that a user means; one object for each, shared by the process.

    Parameters
    ----------
    device : Device, str or torch.device, optional
        "cpu", "cuda", "cuda:N". Default: "cuda:0" where a GPU works, else "cpu".

    Returns
    -------
    Device
        Lives until the process ends unless closed.
    """
    if isinstance(device, Device):
        device._check_open()
        return device
    if device is not None:
        return _open(str(device))
    try:
        return _open("cuda:0")
    except DeviceError as error:
        _log.info("no GPU, running on the CPU: %s", error)
        return _open("cpu")


def _open(name: str) -> Device:
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind):
        raise ArgumentError(f"device {name!r} is neither 'cpu' nor 'cuda:N'")
    ordinal = int(number or 0)
    key = f"{kind}:{ordinal}:{os.getpid()}"
    with _opened_lock:
        found = _opened.get(key)
        if found is None or found._closed:
            found = CpuDevice() if kind == "cpu" else CudaDevice(ordinal)
            _opened[key] = found
        return found
