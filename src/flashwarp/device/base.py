"""`Device`: the interface of a GPU or the CPU device: memory, kernels, streams.

A device owns what it allocates: closing it frees everything, in reverse. Waits have a time limit.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from flashwarp import _native, endings
from flashwarp._jit import cuda_context
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp._names import renamed
from flashwarp.device.foreign import ArrayView, Stream, empty_in_library, view
from flashwarp.device.launches import BuiltInKernels, Launch
from flashwarp.device.memory import (
    DeviceArray,
    DeviceMemory,
    Exported,
    Finalizer,
    MemoryInfo,
    Owned,
    OwnedStream,
    Registration,
    host_bytes,
)
from flashwarp.dtypes import check_dtype, check_shape
from flashwarp.errors import ArgumentError, CaptureError, ClosedError, DeviceError
from flashwarp.policy import CLOCK, Policy

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from flashwarp._jit.compiler import Source

_log = logging.getLogger(__name__)


TIMEOUT_S = 60.0
"""Default limit in seconds of a wait for a stream. A launch moves at most as much as a cache holds:
100 GiB at 3 GB/s take 36 s."""


# The order of work.


@renamed
class Event(ABC):
    """A point in a stream, to wait for or to measure between.

    Attributes
    ----------
    handle : int
        The driver's; 0 on CPU devices.
    """

    handle: int = 0

    @abstractmethod
    def record(self, stream: object = None) -> None:
        """Move the event to the present end of the stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the work before the event has ended."""

    @abstractmethod
    def before(self, stream: object) -> None:
        """Make later work on the stream wait for the event; does not block."""

    @abstractmethod
    def elapsed_ms(self, start: Self) -> float:
        """Return the milliseconds from `start` to this event, both done."""

    def close(self) -> None:  # noqa: B027 - some events hold nothing
        """Release it. May be called twice."""

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Block until done; raises DeviceTimeout."""
        cuda_context.wait_until(self.done, timeout_s, "the event")


# The device.


@renamed
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

    warps_at_once: int = 1
    """So many warps keep the device's memory busy if each copies one line at a time."""

    def __init__(self) -> None:
        self._owned: dict[int, Finalizer] = {}
        self._owned_next = 0
        self._lock = endings.Lock()
        self._closed = False
        self._built_in: dict[Policy, dict[str, LoadedKernel]] = {}
        self._programs: dict[str, LoadedProgram] = {}
        # Launches know their device, so it must not keep them.
        self._kernels: weakref.WeakValueDictionary[Policy, BuiltInKernels] = (
            weakref.WeakValueDictionary()
        )
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
        """Launch the built-in kernel `fw_<name>`, which takes one struct by value.

        Parameters
        ----------
        name : str
            Without the prefix.
        params : ctypes.Structure or bytes
            The struct, copied before this returns.
        warps : int
            How many warps have something to do. The launch has at most as many as the device runs
            at a time, so kernels loop. If 0 or less, nothing is launched.
        block_threads : int
            Threads of a block, a multiple of 32.
        stream : object, optional
            Where it is queued; see `stream_handle`. Default: the library's own stream.
        uses : sequence
            Objects that a launch on the CPU holds until it ends: owners of memory, and native
            controllers, whose commands the launch's waiting threads serve.
        policy : Policy
            The policy of the cache in the parameters. The kernel is compiled with it.

        Notes
        -----
        Returns at once on a GPU, when done on the CPU.
        """
        struct = bytes(params)
        kernel = self.built_in(name, policy, len(struct))
        self.run_kernel(
            kernel, [struct], warps=warps, block_threads=block_threads, stream=stream, uses=uses
        )

    def built_in(
        self, name: str, policy: Policy = CLOCK, param_bytes: int | None = None
    ) -> LoadedKernel:
        """Load a built-in kernel, unless a launch has loaded it.

        On a GPU it is compiled, if neither the package has it compiled nor the cache of compiled
        code: alone, in about a second. Raises DeviceError if it takes a
        struct of another size than `param_bytes`.
        """
        self._check_usable()
        found = self._built_in.get(policy, {}).get(f"fw_{name}")
        if found is None:
            find = functools.partial(self._find_built_in, name, policy)
            found = endings.holding([self._lock], find)
        if param_bytes is not None and found.param_bytes != (param_bytes,):
            raise DeviceError(
                f"kernel fw_{name} takes a struct of {found.param_bytes[0]} bytes, but the host's "
                f"has {param_bytes}: their layouts differ"
            )
        return found

    def kernels_for(self, policy: Policy) -> BuiltInKernels:
        """Return the launches of built-in kernels that all callers with such caches share."""
        found = self._kernels.get(policy)
        if found is None:
            found = self._kernels[policy] = BuiltInKernels(self, policy)
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

        source, options = compiler.built_in(policy)
        alone = (*options, "-DFW_ALL_KERNELS=0", f"-DFW_ONLY_{name}=1")
        return self.load_program(source, options=alone).by_name()

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
        self._check_usable()
        key, load = self._compile(source, include_dirs, options, debug)
        return endings.holding([self._lock], functools.partial(self._load, key, load))

    @abstractmethod
    def _compile(
        self, source: Source, include_dirs: Sequence[Path], options: Sequence[str], debug: bool
    ) -> tuple[str, Callable[[], LoadedProgram]]:
        """Compile a program; return the key of its code, and what loads it."""

    def _load(self, key: str, load: Callable[[], LoadedProgram]) -> LoadedProgram:
        self._check_open()
        if key not in self._programs:
            self._programs[key] = load()
        return self._programs[key]

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
        end: cuda_context.End | None = None,
    ) -> None:
        """Launch a kernel of a loaded program; `launch` describes the parameters.

        `arguments` are the bytes of the kernel's parameters. If `warps` is None, as many warps are
        launched as run at a time. With `end`, a GPU marks the end of the launch.
        """

    def block_threads_for(self, warps: int) -> int:  # noqa: ARG002
        """Return into how large blocks this many warps are best divided."""
        return 256

    @abstractmethod
    def prepare(self, kernel: LoadedKernel, warps: int | None, block_threads: int = 256) -> Launch:
        """Prepare launches of one kernel and one size, for callers that repeat them.

        `warps` and `block_threads` are those of `launch`.

        What is returned is called with the bytes of each parameter, the handle of a stream (None:
        the library's own), and `uses` and `end` as `run_kernel` takes them.
        """

    # Captures of CUDA graphs. CPU devices have none.

    def capture(self, stream: object) -> int | None:  # noqa: ARG002
        """Return the number of the capture in which a stream takes part, or None."""
        return None

    def capture_call(self, stream: object, call: _native.WakeCall) -> None:
        """Make each replay of the graph call a C function, which must live as long as the graph.

        The call runs on a thread of the driver's, beside the work that the stream captures next.
        """
        raise NotImplementedError

    def capture_count(self, stream: object, graphs: _native.CudaGraphs) -> None:
        """Count the graph that is being captured in `graphs` for as long as it exists."""
        raise NotImplementedError

    def refuse_capture(self, what: str, instead: str) -> None:
        """Raise CaptureError if a library's current stream is being captured.

        For calls that do their work at once, so that a replay would not repeat it.
        """

    @abstractmethod
    def default_stream(self) -> Stream:
        """Return the library's own stream, which does not wait for the legacy default stream.

        Calls on other streams come after what is queued on it. They look for that from now on at
        every call, because others may queue work there: who only waits for it asks `own_stream`.
        """

    def own_stream(self) -> int:
        """Return the handle of the library's own stream, to wait for it."""
        return 0

    def note_served(self, stream: int | None) -> None:
        """Note that a kernel which host threads serve was launched, at the end of a stream.

        Until it has ended, calls that would keep those threads from the driver wait for it.
        """

    @abstractmethod
    def create_stream(self) -> OwnedStream:
        """Create a stream for work beside the library's own; it waits for no other stream."""

    @abstractmethod
    def current_stream(self, library: str) -> Stream:
        """Return the current stream of a library ("torch", "cupy", ...) on this device."""

    @abstractmethod
    def order(self, before: object, after: object) -> None:
        """Make later work on stream `after` wait for the present work of stream `before`."""

    @abstractmethod
    def wait(self, stream: object = None, timeout_s: float = TIMEOUT_S) -> None:
        """Block until one stream is done; waits for no other stream. Raises DeviceTimeout."""

    def done(self, stream: object) -> bool:  # noqa: ARG002
        """Return whether a stream is done; raises what a kernel on it has failed with."""
        return True

    def idle(self) -> bool:
        """Return whether no work is known to run: of the library's stream, and other libraries'."""
        return True

    def alive(self) -> bool:
        """Return whether kernels can run: after a fault on a GPU none can. Does not block."""
        return True

    @abstractmethod
    def event(self) -> Event:
        """Create an event that can measure time."""

    def mark(self, stream: object) -> Event:
        """Return an event at the present end of a stream; closing it gives it back to a pool."""
        event = self.event()
        event.record(stream)
        return event

    def wait_any(self, events: Sequence[Event], seconds: float) -> None:
        """Wait until one of these events is done, but no longer than this. Raises nothing."""

    def end_calls(self, queues: list[Any]) -> int:
        """End the asynchronous calls of a GPU that are over and need nothing more; see `Calls`.

        Does not wait. Returns what the first calls of the queues need of a thread: 0, nothing; 1,
        to be ended; 2, a failure of a call that is over to be read.
        """
        raise NotImplementedError

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
