"""A GPU's primary context: what is queued on its streams, and what is known of it.

It is made current around every call, so any thread may use it. Calls that a step of a program makes
go through the extension (`native/cuda/`), which needs a tenth of the time, all others through
cuda-bindings. None of them breaks the capture of a CUDA graph on another stream. No call waits
without a time limit, and none synchronizes a whole device, on which a kernel that waits for I/O may
be running.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from flashwarp import _native, endings
from flashwarp._jit.cuda_api import call_driver, device_count, driver, error_of, uuid_of
from flashwarp._waiting import until
from flashwarp.config import time_limit_s
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    DeviceError,
    DeviceTimeout,
    ForkError,
)

_log = logging.getLogger(__name__)

# Calls that wait for all running kernels, and keep other threads from copies meanwhile. Those that
# allocate or pin memory do not.
_WAIT_FOR_KERNELS = ("cuMemFree", "cuMemFreeHost", "cuMemHostUnregister")

# Results of the extension's calls: those of the driver, and our own.
_NO_STREAM = (201, 400, 709)  # no such context or handle, and a context that was destroyed
_NOT_READY = 600
_CAPTURE_IMPLICIT = 906
_FORKED = -1
CAPTURED = -2


class Memory(enum.IntEnum):
    """What memory is at an address. The driver does not know memory of the host unless pinned."""

    UNKNOWN = 0
    PINNED = 1
    DEVICE = 2


@dataclass(frozen=True)
class Kernel:
    """One loaded kernel of a module, with what its launch needs to know."""

    name: str
    handle: int
    registers: int
    threads_max: int


class End(NamedTuple):
    """What marks the end of a launch: an event, and an entry that is appended to `entries`."""

    event: int
    entries: Any
    entry: Any


class ContextOfStreams:
    """One GPU's primary context, shared with every other library of the process.

    Use as `with context:` around calls that are not its methods; it nests, and any thread may. A
    child process made by fork cannot use its parent's context, so there every use raises.
    """

    def __init__(self, ordinal: int) -> None:
        count = device_count()
        if not 0 <= ordinal < count:
            raise DeviceError(
                f"cuda:{ordinal} does not exist: {count} GPU(s) visible to this process "
                "(CUDA_VISIBLE_DEVICES)"
            )
        self.ordinal = ordinal
        self._pid = os.getpid()
        self._lock = endings.Lock()
        self._device = call_driver("cuDeviceGet", ordinal)
        self._handle = call_driver(
            "cuDevicePrimaryCtxRetain", self._device, doing=f"opening cuda:{ordinal}"
        )
        self._open = True
        # Events at the ends of launches that wait for the host.
        self._served: dict[int, object] = {}
        # A finalizer may come in between.
        self._served_lock = endings.Lock()
        # The pool of events: all, and those that are free.
        self._events: list[int] = []
        self._spare_events: list[int] = []
        try:
            self.calls = _native.CudaContext(int(self._handle))
        except RuntimeError as error:
            raise DeviceError(
                f"the driver of cuda:{ordinal} cannot be used: {error}; CUDA 12 or newer is needed"
            ) from error
        if not self._attribute("UNIFIED_ADDRESSING"):
            self.close()
            raise DeviceError(
                f"cuda:{ordinal} has no unified addressing, which the library needs: "
                "pinned host memory must have one address on the host and on the GPU"
            )

    @property
    def usable(self) -> bool:
        """Whether calls can reach the GPU: still open, and not in a forked child."""
        return self._open and os.getpid() == self._pid

    def close(self) -> None:
        """Give the primary context back. May be called twice."""
        with self._lock:
            if self.usable:
                for event in self._events:
                    with contextlib.suppress(DeviceError):  # the GPU is lost
                        self.call("cuEventDestroy", event)
                self._served.clear()
                self._events.clear()
                self._spare_events.clear()
                self._open = False
                call_driver("cuDevicePrimaryCtxRelease", self._device)

    def __enter__(self) -> Self:
        if not self._open:
            raise ClosedError(f"cuda:{self.ordinal} is closed")
        self.require(self.calls.enter() if self.usable else _FORKED, "cuCtxPushCurrent")
        return self

    def __exit__(self, *exception: object) -> None:
        self.calls.exit()

    def require(self, result: int, name: str, doing: str = "") -> None:
        """Raise what a call of the extension has returned, unless it succeeded."""
        if result == 0:
            return
        if result == _FORKED:
            raise ForkError(
                f"cuda:{self.ordinal} was opened by process {self._pid}, and CUDA does not work "
                "in its forked child: start workers with the 'spawn' method"
            )
        cuda = driver()
        raise error_of(cuda, name, cuda.CUresult(result), doing or f"on cuda:{self.ordinal}")

    def call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        """Call the driver while the context is current; handles and addresses are ints."""
        with self:
            return call_driver(name, *arguments, doing=doing)

    def stream_done(self, stream: int, poll_s: float = 0.0) -> bool:
        """Return whether a stream is done; ask again and again for `poll_s` seconds.

        Raises what a kernel before it has failed with.
        """
        self._require_open()
        # Asking a stream that is being captured would end the capture.
        if self.capture(stream) is not None:
            raise CaptureError(
                f"stream {stream:#x} is being captured into a CUDA graph, so nothing can wait for "
                "it: do this before or after the capture"
            )
        if poll_s:
            return self.poll(stream, poll_s)
        return self._is_done(self.calls.done(stream), "cuStreamQuery")

    def poll(self, stream: int, seconds: float) -> bool:
        """Do as `stream_done`, on a stream that is in no capture."""
        self._require_open()
        return self._is_done(self.calls.poll(stream, int(seconds * 1e6)), "cuStreamQuery")

    def event_done(self, event: int) -> bool:
        """Return whether an event is done; raises as `stream_done` does."""
        self._require_open()
        return self._is_done(self.calls.event_done(event), "cuEventQuery")

    def accesses_done(self, order: _native.Order) -> bool:
        """Return whether all accesses of an array are over; raises as `stream_done` does."""
        self._require_open()
        return self._is_done(order.done(), "cuEventQuery")

    def wait_any(self, events: Sequence[int], seconds: float) -> None:
        """Wait until one of these events is done, or failed, but no longer than this."""
        self._require_open()
        self.calls.wait_any(events, int(seconds * 1e6))

    def end_calls(self, queues: list[Any]) -> int:
        """End what is over in queues of asynchronous calls; see `Device.end_calls`."""
        return self.calls.end_calls(queues)

    def _is_done(self, result: int, name: str) -> bool:
        if result == _NOT_READY:
            return False
        self.require(result, name, f"waiting for cuda:{self.ordinal}")
        return True

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError(f"cuda:{self.ordinal} is closed")

    def order(self, before: int, after: int, event: int) -> None:
        """Make later work on `after` wait for the present work of `before`.

        If `after` is being captured, which cannot wait for other streams, this call waits instead.
        """
        self._require_open()
        result = self.calls.order(before, after, event)
        if result == CAPTURED:
            wait_until(functools.partial(self.stream_done, before), None, f"stream {before:#x}")
            return
        self.require(result, "cuStreamWaitEvent")

    def record(self, event: int, stream: int) -> None:
        """Move an event to the present end of a stream."""
        self._require_open()
        self.require(self.calls.record(event, stream), "cuEventRecord")

    def fill(self, address: int, word: int, count: int, stream: int) -> None:
        """Queue the filling of device memory with `count` words of 32 bits."""
        self._require_open()
        self.require(self.calls.fill(address, word, count, stream), "cuMemsetD32Async")

    # Copies on streams of their own, which are not being captured.

    def memory_kind(self, address: int) -> Memory:
        """Return what kind of memory is at an address."""
        self._require_open()
        result, kind = self.calls.memory(address)
        self.require(result, "cuPointerGetAttribute")
        return Memory(kind)

    @property
    def copies_batches(self) -> bool:
        """Whether the driver copies many pieces in one call (CUDA 12.8)."""
        return self.calls.copies_batches

    def copy_and_append(
        self,
        others: tuple[int, ...],
        mark: int,
        pieces: Sequence[tuple[int, int, int]],
        begin: int,
        end: End | None,
        stream: int,
    ) -> None:
        """Copy pieces (target, source, bytes) after the present work of other streams.

        Records the event `begin`, unless it is 0, before the first piece, and `end`, if any, behind
        the last; then appends its entry. No signal handler runs between these steps. If the call
        fails and the entry was appended, its event marks the end of what had been queued.
        """
        self._require_open()
        end = End(0, [], ()) if end is None else end
        result, _ = self.calls.copy_and_append(
            others, mark, list(pieces), begin, end.event, stream, end.entries, end.entry
        )
        if result in (CAPTURED, _CAPTURE_IMPLICIT):
            raise CaptureError(
                "a copy cannot come after work that is being captured into a CUDA graph: copy "
                "before or after the capture"
            )
        self.require(result, "cuMemcpyAsync", f"copying on cuda:{self.ordinal}")

    def wait_word(self, address: int, value: int, stream: int) -> None:
        """Make later work on a stream wait until a word in pinned memory is at least `value`."""
        self._require_open()
        self.require(self.calls.wait_word(address, value, stream), "cuStreamWaitValue64")

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Store a word in pinned memory after the present work of a stream."""
        self._require_open()
        self.require(self.calls.write_word(address, value, stream), "cuStreamWriteValue64")

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work on a stream wait for an event."""
        if self.capture(stream) is not None:
            raise CaptureError(
                f"stream {stream:#x} is being captured into a CUDA graph, which cannot wait for a "
                "copy outside of it: order them before or after the capture"
            )
        self.call("cuStreamWaitEvent", stream, event, 0)

    def elapsed_ns(self, begin: int, end: int) -> int:
        """Return the nanoseconds between two events that are done and measure time."""
        return round(float(self.call("cuEventElapsedTime", begin, end)) * 1e6)

    # Captures into CUDA graphs.

    def capture(self, stream: int) -> int | None:
        """Return the number of the capture in which a stream takes part, or None."""
        result, active, number = self.calls.capture(stream)
        if result == _CAPTURE_IMPLICIT:
            # The legacy default stream, which would join the capture of another stream.
            return 0
        if result:
            self.refuse_stream(result, stream)
            self.require(result, "cuStreamGetCaptureInfo")
        return number if active else None

    def capture_call(self, stream: int, call: int, argument: int) -> None:
        """Make each replay call a C function beside what the stream queues next."""
        self.require(self.calls.capture_call(stream, call, argument), "cuGraphAddHostNode")

    def capture_count(self, stream: int, graphs: _native.CudaGraphs) -> None:
        """Count the graph being captured in `graphs` for as long as it exists."""
        self.require(self.calls.capture_count(stream, graphs), "cuGraphRetainUserObject")

    def releasing(self, name: str, handle: int) -> Callable[[], None]:
        """Return what releases a handle by a call, but not once the context cannot be used.

        A forked child must not free its parent's memory.
        """

        def release() -> None:
            if self.usable:
                if name in _WAIT_FOR_KERNELS:
                    self.outlast_served()
                self.call(name, handle)

        return release

    # Kernels that host threads serve by calls of the driver, as kernels' batches are served.

    def note_served(self, stream: int) -> None:
        """Note that a kernel which host threads serve was launched, at the end of a stream.

        One that becomes part of a CUDA graph is not noted.
        """
        if self.capture(stream) is not None:
            return
        with self._served_lock:
            for event, launch in itertools.islice(tuple(self._served.items()), 2):
                if self.event_done(event):
                    self._forget_served(event, launch)
            event = self.take_event()
            self.record(event, stream)
            self._served[event] = object()

    def outlast_served(self) -> None:
        """Wait for the noted kernels, before a call that waits for kernels and holds the driver.

        The threads that serve such a kernel could not call the driver meanwhile, and its waits
        would run out of time.
        """
        for event, launch in tuple(self._served.items()):
            try:
                waited = until(functools.partial(self.event_done, event), time_limit_s())
            except DeviceError:  # the GPU is lost, as the call that follows will say
                return
            if waited is None:
                self._forget_served(event, launch)
            else:
                _log.warning(
                    "memory of cuda:%d is released, or code loaded, while a kernel that waits for "
                    "the host has run for more than %.0f s: its batches may fail",
                    self.ordinal,
                    waited,
                )

    def _forget_served(self, event: int, launch: object) -> None:
        # Another thread may have seen it done, too, and the event may be that of a later launch by
        # now. Another one may look at it yet: it is kept until the end.
        with self._served_lock:
            if self._served.get(event) is launch:
                del self._served[event]
                self.give_event(event)

    # Properties of the device.

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call_driver("cuDeviceGetAttribute", attribute, self._device))

    @functools.cached_property
    def model(self) -> str:
        """The GPU's product name."""
        name: bytes = call_driver("cuDeviceGetName", 256, self._device)
        return name.split(b"\0")[0].decode()

    @functools.cached_property
    def uuid(self) -> str:
        """What names the GPU in every process."""
        return uuid_of(self._device)

    @functools.cached_property
    def multiprocessors(self) -> int:
        return self._attribute("MULTIPROCESSOR_COUNT")

    @functools.cached_property
    def compute_capability(self) -> tuple[int, int]:
        return (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )

    @functools.cached_property
    def registers_read_only(self) -> bool:
        """Whether read-only host memory, such as a mapped read-only file, can be registered."""
        return bool(self._attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"))

    @functools.cached_property
    def exports_dma_buf(self) -> bool:
        """Whether its memory can be given to other devices as a dma-buf."""
        return bool(self._attribute("DMA_BUF_SUPPORTED"))

    @functools.cached_property
    def orders_dma_writes(self) -> bool:
        """Whether its threads see what a device writes to its memory in the order of the writes.

        Else they may see a later write, such as a completion, before the data that came first.
        """
        owner = driver().CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
        return self._attribute("GPU_DIRECT_RDMA_WRITES_ORDERING") >= int(owner)

    # Streams and events.

    def create_stream(self) -> int:
        """Create a stream that does not wait for the legacy default stream, nor makes it wait."""
        return int(self.call("cuStreamCreate", int(driver().CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def create_event(self, *, timing: bool) -> int:
        flags = driver().CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        return int(self.call("cuEventCreate", int(flag)))

    def take_event(self) -> int:
        """Take an event that measures no time from the pool of the GPU; waits for nothing."""
        try:
            return self._spare_events.pop()
        except IndexError:
            self.provide_events(1)
            return self.take_event()

    def provide_events(self, count: int) -> None:
        """Create events until so many are free."""
        while len(self._spare_events) < count:
            self._events.append(self.create_event(timing=False))
            self._spare_events.append(self._events[-1])

    def give_event(self, event: int) -> None:
        """Give an event back. Waits look at what it recorded when they were queued."""
        self._spare_events.append(event)

    # Launches.

    def launch(
        self,
        kernel: Kernel,
        blocks: int,
        block_threads: int,
        params: Sequence[bytes],
        stream: int,
    ) -> None:
        """Launch a kernel; `params` are the bytes of its parameters, one by one."""
        self._require_open()
        result = self.calls.launch(kernel.handle, blocks, block_threads, tuple(params), stream)
        if result:
            self.refuse_launch(result, kernel, blocks, block_threads, stream)

    def refuse_launch(
        self, result: int, kernel: Kernel, blocks: int, block_threads: int, stream: int
    ) -> None:
        """Raise why a launch failed."""
        self.refuse_stream(result, stream)
        launching = f"kernel {kernel.name}, {blocks} blocks of {block_threads} threads"
        self.require(result, "cuLaunchKernel", launching)

    def refuse_stream(self, result: int, stream: int) -> None:
        """Raise ArgumentError if a call has failed because there is no such stream here."""
        if result not in _NO_STREAM:
            return
        with self:
            try:
                context = call_driver("cuStreamGetCtx", stream)
            except DeviceError as error:
                raise ArgumentError(
                    f"stream {stream:#x} does not exist on cuda:{self.ordinal}, or its context "
                    "was destroyed: give a stream of this process that is open"
                ) from error
            if int(context) == int(self._handle):
                return
            call_driver("cuCtxPushCurrent", context)
            try:
                other = int(call_driver("cuCtxGetDevice"))
            finally:
                call_driver("cuCtxPopCurrent")
        raise ArgumentError(
            f"stream {stream:#x} is of cuda:{other}, and the launch is on cuda:{self.ordinal}: "
            f"give it a stream of cuda:{self.ordinal}"
        )


def wait_until(done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
    """Poll `done` with growing sleeps; raise DeviceTimeout after `timeout_s` seconds.

    Time in which the process was stopped does not count.
    """
    limit_s = time_limit_s(timeout_s)
    waited = until(done, limit_s)
    if waited is not None:
        raise DeviceTimeout(
            f"{what} is not done after {waited:.1f} s (limit {limit_s:g} s): a kernel still "
            "runs, or waits for a completion that does not come"
        )
