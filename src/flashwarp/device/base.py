"""`Device`: what every place where kernels run can do, and the order of its work.

A device owns what it allocates: closing it frees all of it, in reverse. Waits have a time limit.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp._jit import driver
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp.device.foreign import ArrayView, Stream, empty_in_library, view
from flashwarp.device.memory import (
    DeviceArray,
    DeviceMemory,
    MemoryInfo,
    Owned,
    OwnedStream,
    Registration,
)
from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import ArgumentError, ClosedError, DeviceError
from flashwarp.policy import CLOCK, Policy

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from flashwarp._jit.compiler import Source

_log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Default limit of a wait for a stream. An honest launch moves at most one cache-full of data:
100 GiB at 3 GB/s take 36 s."""


# The order of work.


class Event(ABC):
    """A point in a stream, to wait for or to measure between."""

    @abstractmethod
    def record(self, stream: object = None) -> None:
        """Move the event to the present end of the stream."""

    @abstractmethod
    def done(self) -> bool:
        """Tell whether the work before the event has ended."""

    @abstractmethod
    def wait_on(self, stream: object) -> None:
        """Make what is queued on the stream from now on wait for the event, without blocking."""

    @abstractmethod
    def elapsed_ms(self, start: Self) -> float:
        """Return the milliseconds from `start` to this event, both done."""

    def close(self) -> None:  # noqa: B027 - not every event holds something
        """Release it. May be called twice."""

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Block until done; raises DeviceTimeout."""
        driver.wait_until(self.done, timeout_s, "the event")


# The device.


class Device(endings.Closing, ABC):
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

    name: str
    kind: str
    ordinal: int | None = None

    def __init__(self) -> None:
        self._owned: dict[int, weakref.finalize[Any, Any]] = {}
        self._owned_next = 0
        self._lock = threading.RLock()
        self._closed = False
        self._built_in: dict[Policy, dict[str, LoadedKernel]] = {}
        # What else is closed with it, after its arrays: caches.
        self.carries: weakref.WeakSet[Any] = weakref.WeakSet()

    # Memory. What moves bytes does so in the order of `stream`, by default the library's own.

    @abstractmethod
    def allocate(self, nbytes: int, stream: object = None) -> DeviceMemory:
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
    def upload(
        self, address: int, data: ReadableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        """Copy contiguous host data to device memory; returns when `data` may be changed."""

    @abstractmethod
    def download_into(
        self, address: int, target: WriteableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        """Copy device memory into a contiguous host buffer; returns when it is there."""

    @abstractmethod
    def fill(self, address: int, byte: int, nbytes: int, stream: object = None) -> None:
        """Set every byte; returns when done."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return what can be allocated."""

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

    # Kernels and streams.

    def launch(
        self,
        name: str,
        params: ctypes.Structure | bytes,
        *,
        warps: int,
        block_threads: int = 256,
        stream: object = None,
        uses: Sequence[object] = (),
        policy: Policy = CLOCK,
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
        stream : object, optional
            Where it is queued; see `stream_handle`. Default: the library's own stream.
        uses : sequence
            What a launch on the CPU holds until it ends: native controllers, whose work its waiting
            threads do, and owners of memory.
        policy : Policy
            That of the cache which the parameters name: the kernel is compiled with it.

        Notes
        -----
        Returns at once on a GPU, when done on the CPU.
        """
        kernel = self.built_in(name, policy)
        struct, (expected,) = bytes(params), kernel.param_bytes
        if len(struct) != expected:
            raise DeviceError(
                f"kernel fw_{name} takes a struct of {expected} bytes, but the host's has "
                f"{len(struct)}: their layouts differ"
            )
        self.run_kernel(
            kernel, [struct], warps=warps, block_threads=block_threads, stream=stream, uses=uses
        )

    def built_in(self, name: str, policy: Policy = CLOCK) -> LoadedKernel:
        """Load a built-in kernel, which its first launch does otherwise.

        On a GPU it is compiled alone, for some seconds, unless it was compiled before.
        """
        self._check_usable()
        found = self._built_in.get(policy, {}).get(f"fw_{name}")
        if found is None:
            find = functools.partial(self._find_built_in, name, policy)
            found = endings.holding([self._lock], find)
        return found

    def _find_built_in(self, name: str, policy: Policy) -> LoadedKernel:
        kernels = self._built_in.setdefault(policy, {})
        if f"fw_{name}" not in kernels:
            kernels.update(self._load_built_in(name, policy))
        try:
            return kernels[f"fw_{name}"]
        except KeyError:
            raise ArgumentError(f"there is no built-in kernel fw_{name}") from None

    def _load_built_in(self, name: str, policy: Policy) -> dict[str, LoadedKernel]:
        """Load the kernel, and those that come with it; return them by symbol."""
        from flashwarp._jit import compiler  # slow to import, and many launches need none

        source = compiler.Source.read(compiler.MODULE).behind(policy)
        options = (*policy.options, "-DFW_ALL_KERNELS=0", f"-DFW_ONLY_{name}=1")
        return self.load_program(source, options=options).by_name()

    @abstractmethod
    def load_program(
        self,
        source: Source,
        *,
        include_dirs: Sequence[Path] = (),
        options: Sequence[str] = (),
        debug: bool = False,
    ) -> LoadedProgram:
        """Compile a program for this device, or find it compiled, and load its kernels.

        The library's own headers are found after those in `include_dirs`. The program stays loaded
        until the device is closed: unloading would wait for running kernels.
        """

    @abstractmethod
    def run_kernel(
        self,
        kernel: LoadedKernel,
        arguments: Sequence[bytes],
        *,
        warps: int | None = None,
        block_threads: int = 256,
        stream: object = None,
        uses: Sequence[object] = (),
    ) -> None:
        """Launch a kernel of a loaded program; `launch` says what the parameters mean.

        `arguments` are the bytes of its parameters; `warps` None: as many as run at a time.
        """

    @abstractmethod
    def default_stream(self) -> Stream:
        """Return the library's own stream, which does not wait for the legacy default stream."""

    @abstractmethod
    def create_stream(self) -> OwnedStream:
        """Create a stream that waits for no other, for work beside the library's own stream."""

    @abstractmethod
    def current_stream(self, library: str) -> Stream:
        """Return the stream that a library ("torch", "cupy", ...) uses on this device now."""

    @abstractmethod
    def order(self, before: object, after: object) -> None:
        """Make what is queued on stream `after` from now on wait for what `before` has queued."""

    @abstractmethod
    def synchronize(self, stream: object = None, timeout_s: float = TIMEOUT_S) -> None:
        """Block until one stream is done, and waits for no other; raises DeviceTimeout."""

    def alive(self) -> bool:
        """Tell whether kernels can run, without waiting: after a fault on a GPU none can."""
        return True

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

    def _own(self, thing: Owned, release: Callable[[], None]) -> weakref.finalize[Any, Any]:
        return endings.holding([self._lock], functools.partial(self._note, thing, release))

    def _note(self, thing: Owned, release: Callable[[], None]) -> weakref.finalize[Any, Any]:
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

    def _check_usable(self) -> None:
        """Raise where kernels cannot be launched: ClosedError, and ForkError on the CPU."""
        self._check_open()

    def close(self) -> None:
        """Close the arrays and caches that are on the device, then release all that it handed out.

        May be called twice. Blocks while stores are flushed; what could not be is raised in the
        end.
        """
        failure = endings.close_all(self)
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


def _release(owned: dict[int, Any], key: int, release: Callable[[], None]) -> None:
    owned.pop(key, None)
    quietly(release)


def quietly(release: Callable[[], None]) -> None:
    """Release something, and only log what the driver has against it."""
    try:
        release()
    except DeviceError as error:
        # After a kernel's fault every call fails; the fault itself was raised where it was found.
        _log.info("release failed: %s", error)
