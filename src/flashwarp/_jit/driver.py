"""The CUDA driver behind typed Python calls: the only file that imports CUDA packages.

`Context` owns one GPU's primary context and makes it current around every call, so any thread may
use it. Calls that a step of a program makes go through the extension (`native/cuda/`), which needs
a tenth of the time, all others through cuda-bindings. None of them breaks the capture of a CUDA
graph on another stream. Every failing driver call raises an exception that names the call, CUDA's
error and what to do about it. No call waits without a time limit, and none synchronizes a whole
device, on which a kernel that waits for I/O may be running.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashwarp import _native, endings
from flashwarp._waiting import until
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    CompileError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    ForkError,
)

_log = logging.getLogger(__name__)

# Ways out of the errors that users can cause. Other errors carry CUDA's own description.
_ADVICE = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory or choose a smaller cache",
    "CUDA_ERROR_NO_DEVICE": (
        "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'"
    ),
    "CUDA_ERROR_INVALID_DEVICE": "no GPU has this number: see CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel driver and libcuda.so.1 differ: reboot",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the cuda-compat package",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": (
        "the compiler is newer than the driver: update the driver or install an older "
        "nvidia-cuda-nvrtc"
    ),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the code was compiled for another GPU architecture",
    "CUDA_ERROR_INVALID_IMAGE": (
        "the driver cannot read the compiled code: update the driver or install an older "
        "nvidia-cuda-nvrtc"
    ),
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": (
        "a page of this range is registered already: close the other registration first"
    ),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (
        "a kernel touched memory that is not its own; this process cannot use the GPU any more: "
        "restart it, and find the access with compute-sanitizer"
    ),
    "CUDA_ERROR_MISALIGNED_ADDRESS": (
        "a kernel made an unaligned access; this process cannot use the GPU any more: restart it"
    ),
    "CUDA_ERROR_LAUNCH_FAILED": "this process cannot use the GPU any more: restart it",
    "CUDA_ERROR_ASSERT": "a device assertion failed; its text is on standard output",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (
        "the stream is being captured into a CUDA graph: do this before or after the capture"
    ),
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the device was closed or reset",
}

# Calls that wait for all running kernels, and keep other threads from copies meanwhile. Those that
# allocate or pin memory do not.
_WAIT_FOR_KERNELS = ("cuMemFree", "cuMemFreeHost", "cuMemHostUnregister")

# Results of the extension's calls: those of the driver, and our own.
_INVALID_HANDLE = 400
_NOT_READY = 600
_CAPTURE_IMPLICIT = 906
_FORKED = -1
CAPTURED = -2

ORDER_S = 60.0
"""The longest wait for the library's own stream before a launch into a capture."""

SERVED_S = 60.0
"""The longest wait for a kernel that host threads serve, before a call that would disturb it."""


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"CUDA was not found: importing {module} failed ({error}). "
            "Install it with: pip install 'flashwarp[cuda]'; or use device='cpu'."
        ) from error


@functools.cache
def _cuda() -> Any:
    """Return the driver API, initialized once a process."""
    cuda = _import("cuda.bindings.driver")
    try:
        (status,) = cuda.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(
            f"CUDA's driver was not found: {str(error).rstrip('.')}. "
            "libcuda.so.1 comes with the NVIDIA driver; without one use device='cpu'."
        ) from error
    if int(status) != 0:
        raise _error(cuda, "cuInit", status)
    return cuda


def _error(cuda: Any, call: str, status: Any, doing: str = "") -> DeviceError | DeviceOutOfMemory:
    """Make the exception for one failed driver call."""
    code = int(status)
    name, text = f"CUDA error {code}", "unknown to the driver"
    name_status, name_bytes = cuda.cuGetErrorName(status)
    text_status, text_bytes = cuda.cuGetErrorString(status)
    if int(name_status) == 0 and int(text_status) == 0:
        name, text = name_bytes.decode(), text_bytes.decode()
    message = f"{doing + ': ' if doing else ''}{call} failed with {name} ({text})"
    advice = _ADVICE.get(name)
    if advice:
        message += f": {advice}"
    kind = DeviceOutOfMemory if name == "CUDA_ERROR_OUT_OF_MEMORY" else DeviceError
    return kind(message)


def _call(call: str, *arguments: Any, doing: str = "") -> Any:
    """Call the driver; return its one value, or None where it gives none."""
    cuda = _cuda()
    status, *values = getattr(cuda, call)(*arguments)
    if int(status) != 0:
        raise _error(cuda, call, status, doing)
    return values[0] if len(values) == 1 else (tuple(values) or None)


def device_count() -> int:
    """Count the GPUs this process sees. Raises DeviceError where CUDA does not work."""
    return int(_call("cuDeviceGetCount"))


def device_uuids() -> list[str]:
    """Return what names each GPU that this process sees in every process, by ordinal."""
    return [uuid_of(_call("cuDeviceGet", ordinal)) for ordinal in range(device_count())]


def uuid_of(device: Any) -> str:
    """Return what names a GPU in every process, whatever its ordinal there."""
    return bytes(_call("cuDeviceGetUuid", device).bytes).hex()


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the installed driver serves, as (major, minor)."""
    version = int(_call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


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


class Context:
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
        self._device = _call("cuDeviceGet", ordinal)
        self._handle = _call(
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
                _call("cuDevicePrimaryCtxRelease", self._device)

    def __enter__(self) -> Context:
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
        cuda = _cuda()
        raise _error(cuda, name, cuda.CUresult(result), doing or f"on cuda:{self.ordinal}")

    def call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        """Call the driver while the context is current; handles and addresses are ints."""
        with self:
            return _call(name, *arguments, doing=doing)

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
            wait_until(functools.partial(self.stream_done, before), ORDER_S, f"stream {before:#x}")
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
                waited = until(functools.partial(self.event_done, event), SERVED_S)
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
        attribute = getattr(_cuda().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call("cuDeviceGetAttribute", attribute, self._device))

    @functools.cached_property
    def model(self) -> str:
        """The GPU's product name."""
        name: bytes = _call("cuDeviceGetName", 256, self._device)
        return name.split(b"\0")[0].decode()

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
        owner = _cuda().CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
        return self._attribute("GPU_DIRECT_RDMA_WRITES_ORDERING") >= int(owner)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU's memory."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    # Memory. Frees and unregistrations wait for every running kernel: call them when idle.

    def allocate(self, nbytes: int) -> int:
        """Uninitialized device memory; returns its address."""
        with self:
            doing = f"allocating {nbytes} bytes on cuda:{self.ordinal}"
            try:
                return int(_call("cuMemAlloc", nbytes, doing=doing))
            except DeviceOutOfMemory as error:
                free, total = _call("cuMemGetInfo")
                raise DeviceOutOfMemory(f"{error} ({free} of {total} bytes are free)") from None

    def allocate_host(self, nbytes: int) -> int:
        """Uninitialized pinned host memory with one address for the host and all GPUs."""
        cuda = _cuda()
        flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
        with self:
            doing = f"pinning {nbytes} bytes of host memory"
            address = int(_call("cuMemHostAlloc", nbytes, flags, doing=doing))
            self._require_same_address(address, "cuMemFreeHost")
        return address

    def allocate_exported(self, nbytes: int) -> tuple[int, int, int]:
        """Uninitialized device memory that other processes can map.

        Returns its address, its bytes, which are rounded up, and a descriptor of the caller's.
        """
        cuda, doing = _cuda(), f"allocating {nbytes} bytes on cuda:{self.ordinal} to share"
        with self, contextlib.ExitStack() as undo:
            wanted, size = self._shareable(cuda, nbytes, doing)
            handle = _call("cuMemCreate", size, wanted, 0, doing=doing)
            # The mapping and the descriptor keep the memory.
            undo.callback(_call, "cuMemRelease", handle)
            with contextlib.ExitStack() as failed:
                address = self._map(cuda, handle, size, failed, writable=True)
                kind = wanted.requestedHandleTypes
                descriptor = int(_call("cuMemExportToShareableHandle", handle, kind, 0))
                failed.pop_all()
        return address, size, descriptor

    def map_exported(
        self, descriptor: int, nbytes: int, *, writable: bool = False
    ) -> tuple[int, int]:
        """Map memory of `allocate_exported`; returns its address and its bytes."""
        cuda, doing = _cuda(), f"mapping {nbytes} bytes of another process on cuda:{self.ordinal}"
        with self, contextlib.ExitStack() as undo:
            wanted, size = self._shareable(cuda, nbytes, doing)
            kind = wanted.requestedHandleTypes
            handle = _call("cuMemImportFromShareableHandle", descriptor, kind, doing=doing)
            undo.callback(_call, "cuMemRelease", handle)
            with contextlib.ExitStack() as failed:
                address = self._map(cuda, handle, size, failed, writable=writable)
                failed.pop_all()
        return address, size

    def _shareable(self, cuda: Any, nbytes: int, doing: str) -> tuple[Any, int]:
        """Return the properties of memory to share, and its bytes, rounded up."""
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = self._location(cuda)
        handles = cuda.CUmemAllocationHandleType
        wanted.requestedHandleTypes = handles.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        smallest = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(_call("cuMemGetAllocationGranularity", wanted, smallest, doing=doing))
        return wanted, -(-nbytes // unit) * unit

    def unmap_exported(self, address: int, nbytes: int) -> None:
        """End a mapping of `allocate_exported` or `map_exported`."""
        if self.usable:
            self.outlast_served()
            self.call("cuMemUnmap", address, nbytes)
            self.call("cuMemAddressFree", address, nbytes)

    def _map(
        self, cuda: Any, handle: Any, size: int, failed: contextlib.ExitStack, *, writable: bool
    ) -> int:
        address = int(_call("cuMemAddressReserve", size, 0, 0, 0))
        failed.callback(_call, "cuMemAddressFree", address, size)
        _call("cuMemMap", address, size, 0, handle, 0)
        failed.callback(_call, "cuMemUnmap", address, size)
        rights, access = cuda.CUmemAccess_flags, cuda.CUmemAccessDesc()
        access.location = self._location(cuda)
        access.flags = (
            rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else rights.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        doing = f"making {size} bytes {'writable' if writable else 'readable'} to this process"
        _call("cuMemSetAccess", address, size, [access], 1, doing=doing)
        return address

    def _location(self, cuda: Any) -> Any:
        location = cuda.CUmemLocation()
        location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.ordinal
        return location

    @functools.cached_property
    def uuid(self) -> str:
        """What names the GPU in every process."""
        return uuid_of(self._device)

    def allocate_managed(self, nbytes: int) -> int:
        """Managed memory; never ask for more than the GPU has free."""
        flags = int(_cuda().CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        return int(self.call("cuMemAllocManaged", nbytes, flags))

    def place_managed(self, address: int, nbytes: int, stream: int, *, on_host: bool) -> None:
        """Advise the driver to keep managed memory somewhere, and queue a prefetch to there."""
        cuda = _cuda()
        kinds, location = cuda.CUmemLocationType, cuda.CUmemLocation()
        location.type = (
            kinds.CU_MEM_LOCATION_TYPE_HOST if on_host else kinds.CU_MEM_LOCATION_TYPE_DEVICE
        )
        location.id = 0 if on_host else self.ordinal
        prefers = cuda.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
        self.call("cuMemAdvise", address, nbytes, prefers, location)
        self.call("cuMemPrefetchAsync", address, nbytes, location, 0, stream)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> None:
        """Pins host memory that exists already, so that kernels reach it at the same address."""
        cuda = _cuda()
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        if read_only:
            if not self.registers_read_only:
                raise DeviceError(
                    f"cuda:{self.ordinal} cannot register read-only host memory, so it cannot read "
                    "a mapped file in place"
                )
            flags |= cuda.CU_MEMHOSTREGISTER_READ_ONLY
        kind = "read-only" if read_only else "writable"
        doing = f"registering {nbytes} {kind} bytes of host memory at {address:#x}"
        with self:
            try:
                _call("cuMemHostRegister", address, nbytes, flags, doing=doing)
            except DeviceError as error:
                if self._attribute("HOST_REGISTER_SUPPORTED"):
                    raise
                raise type(error)(
                    f"{error}; cuda:{self.ordinal} registers no host memory at all, as under "
                    "confidential computing"
                ) from None
            self._require_same_address(address, "cuMemHostUnregister")

    def register_io(self, address: int, nbytes: int) -> int:
        """Make a mapping of another device's registers reachable by kernels; returns their address.

        Kernels use `store_mmio` there.
        """
        cuda = _cuda()
        flags = cuda.CU_MEMHOSTREGISTER_DEVICEMAP | cuda.CU_MEMHOSTREGISTER_IOMEMORY
        doing = f"registering {nbytes} bytes of I/O memory at {address:#x}"
        with self:
            _call("cuMemHostRegister", address, nbytes, flags, doing=doing)
            try:
                return int(_call("cuMemHostGetDevicePointer", address, 0))
            except DeviceError:
                _call("cuMemHostUnregister", address)
                raise

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        """Return a descriptor of the GPU's pages at an address, for other devices' drivers.

        Both are multiples of the host's page. The caller closes the descriptor.
        """
        kind = _cuda().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        doing = f"exporting {nbytes} bytes at {address:#x} of cuda:{self.ordinal} as a dma-buf"
        with self:
            return int(
                _call("cuMemGetHandleForAddressRange", address, nbytes, kind, 0, doing=doing)
            )

    def _require_same_address(self, address: int, undo: str) -> None:
        """Commands carry one address that both the controller and the kernels use."""
        try:
            on_device = int(_call("cuMemHostGetDevicePointer", address, 0))
            if on_device != address:
                raise DeviceError(
                    f"pinned host memory at {address:#x} appears on cuda:{self.ordinal} at "
                    f"{on_device:#x}: the library needs one address for both"
                )
        except DeviceError:
            _call(undo, address)
            raise

    # Streams and events.

    def create_stream(self) -> int:
        """Create a stream that does not wait for the legacy default stream, nor makes it wait."""
        return int(self.call("cuStreamCreate", int(_cuda().CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def create_event(self, *, timing: bool) -> int:
        flags = _cuda().CUevent_flags
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

    def launch_among(
        self,
        others: tuple[int, ...],
        both_ways: bool,
        mark: int,
        size: tuple[Kernel, int, int],
        params: tuple[bytes, ...],
        stream: int,
    ) -> bool:
        """Launch a kernel after the present work of other streams.

        With `both_ways` their later work waits for the launch, too. Returns False, and does
        nothing, if a stream that would wait is being captured. `mark` is an event. `size` is the
        kernel, and its blocks and their threads.
        """
        kernel, blocks, threads = size
        if not self._open:
            self._require_open()
        result = self.calls.launch_among(
            others, both_ways, mark, kernel.handle, blocks, threads, params, stream
        )
        if not result:
            return True
        if result not in (CAPTURED, _CAPTURE_IMPLICIT):
            self.refuse_launch(result, kernel, blocks, threads, stream)
        return False

    def launch_and_append(
        self,
        others: tuple[int, ...],
        mark: int,
        size: tuple[Kernel, int, int],
        params: tuple[bytes, ...],
        stream: int,
        end: End,
    ) -> bool:
        """Launch a kernel as `launch_among` does, record an event, and append an entry to a list.

        No signal handler runs between these steps. If the launch fails, nothing is appended. If
        the kernel runs and only the recording fails, the entry is appended and the error raised.
        """
        kernel, blocks, threads = size
        self._require_open()
        result, recorded = self.calls.launch_and_append(
            others, mark, kernel.handle, blocks, threads, params, stream, *end
        )
        if result in (CAPTURED, _CAPTURE_IMPLICIT):
            return False
        if result:
            self.refuse_launch(result, kernel, blocks, threads, stream)
        if recorded:
            self.require(recorded, "cuEventRecord")
        return True

    def refuse_launch(
        self, result: int, kernel: Kernel, blocks: int, block_threads: int, stream: int
    ) -> None:
        """Raise why a launch failed."""
        if result == _INVALID_HANDLE:
            self._refuse_foreign(stream)
        launching = f"kernel {kernel.name}, {blocks} blocks of {block_threads} threads"
        self.require(result, "cuLaunchKernel", launching)

    def _refuse_foreign(self, stream: int) -> None:
        """Raise ArgumentError if a stream is of another device."""
        with self:
            try:
                context = _call("cuStreamGetCtx", stream)
            except DeviceError:  # there is no such stream, as the driver has said
                return
            if int(context) == int(self._handle):
                return
            _call("cuCtxPushCurrent", context)
            try:
                other = int(_call("cuCtxGetDevice"))
            finally:
                _call("cuCtxPopCurrent")
        raise ArgumentError(
            f"stream {stream:#x} is of cuda:{other}, and the launch is on cuda:{self.ordinal}: "
            f"give it a stream of cuda:{self.ordinal}"
        )


class End(NamedTuple):
    """What marks the end of a launch: an event, and an entry that is appended to `entries`."""

    event: int
    entries: Any
    entry: Any


class Module:
    """All kernels of one cubin, loaded completely.

    With CUDA's lazy loading the first launch of a kernel can wait for all running kernels. When a
    running kernel waits for us in turn, the process hangs; so nothing is left to load later.
    """

    def __init__(self, context: Context, cubin: bytes, names: Sequence[str]) -> None:
        self._context = context
        self._resident: dict[tuple[str, int], int] = {}
        context.outlast_served()
        with context:
            self._handle = _call("cuModuleLoadData", cubin, doing="loading the compiled kernels")
            try:
                self.kernels = {name: self._load(name) for name in names}
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Unloads the kernels; none of them may be running."""
        self._context.outlast_served()
        self._context.call("cuModuleUnload", self._handle)

    def _load(self, name: str) -> Kernel:
        handle = _call("cuModuleGetFunction", self._handle, name.encode(), doing=f"kernel {name}")
        # Added in CUDA 12.4. Before it, asking for an attribute loads the kernel too.
        if hasattr(_cuda(), "cuFuncLoad") and driver_version() >= (12, 4):
            _call("cuFuncLoad", handle, doing=f"kernel {name}")
        return Kernel(
            name=name,
            handle=int(handle),
            registers=_function_attribute(handle, "NUM_REGS"),
            threads_max=_function_attribute(handle, "MAX_THREADS_PER_BLOCK"),
        )

    def resident_blocks(self, kernel: Kernel, block_threads: int) -> int:
        """Count the blocks of a kernel that one multiprocessor runs at a time."""
        key = (kernel.name, block_threads)
        if key not in self._resident:
            count = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            self._resident[key] = int(self._context.call(count, kernel.handle, block_threads, 0))
        return self._resident[key]


def _function_attribute(handle: Any, name: str) -> int:
    attribute = getattr(_cuda().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    return int(_call("cuFuncGetAttribute", attribute, handle))


def dlpack_view(array: Any, stream: int | None) -> Any:
    """View a DLPack array on a GPU: ptr, shape, strides (in elements), dtype, readonly.

    With a stream the producer makes its work visible there; without one nothing is waited for.
    """
    utils = _import("cuda.core.utils")
    return utils.StridedMemoryView.from_dlpack(array, -1 if stream is None else stream)


def wait_until(done: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll `done` with growing sleeps; raise DeviceTimeout after `timeout_s` seconds.

    Time in which the process was stopped does not count.
    """
    waited = until(done, timeout_s)
    if waited is not None:
        raise DeviceTimeout(
            f"{what} is not done after {waited:.1f} s (limit {timeout_s:g} s): a kernel still "
            "runs, or waits for a completion that does not come"
        )


# NVRTC, which needs no GPU and no driver.

# The headers use instructions that came with it, and the versions of CUDA 12 know older ones.
_ARCHITECTURE_OLDEST = 70


@functools.cache
def _nvrtc() -> Any:
    try:
        return _import("cuda.bindings.nvrtc")
    except DeviceError as error:
        raise CompileError(str(error)) from error


def _nvrtc_call(call: str, *arguments: Any) -> Any:
    nvrtc = _nvrtc()
    try:
        status, *values = getattr(nvrtc, call)(*arguments)
    except RuntimeError as error:
        raise CompileError(
            f"CUDA's run-time compiler was not found: {error}. "
            "Install it with: pip install 'flashwarp[cuda]'"
        ) from error
    if int(status) != 0:
        text = nvrtc.nvrtcGetErrorString(status)[1].decode()
        raise CompileError(f"{call} failed with {text}")
    return values[0] if len(values) == 1 else (tuple(values) or None)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the run-time compiler, as (major, minor)."""
    major, minor = _nvrtc_call("nvrtcVersion")
    return int(major), int(minor)


@functools.cache
def nvrtc_identity() -> str:
    """Tell one build of the run-time compiler from another: version, and its libraries' files."""
    major, minor = nvrtc_version()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    loaded = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libnvrtc.so" in line}
    files = []
    folders = {Path(line).parent for line in loaded}
    for path in sorted(file for folder in folders for file in folder.glob("libnvrtc*")):
        status = path.stat()
        files.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return f"{major}.{minor} {files}"


def nvrtc_architectures() -> tuple[int, ...]:
    """List what the headers can be compiled for: 90 for sm_90, in ascending order."""
    known = map(int, _nvrtc_call("nvrtcGetSupportedArchs"))
    return tuple(sorted(arch for arch in known if arch >= _ARCHITECTURE_OLDEST))


def nvrtc_compile(
    source: bytes,
    name: str,
    headers: dict[str, bytes],
    options: Sequence[str],
    form: str = "CUBIN",
) -> tuple[bytes, str]:
    """Compiles to a cubin, or with form "LTOIR" to what a linker optimizes with other code.

    Returns it and the compiler's log; raises CompileError with the log.
    """
    program = _nvrtc_call(
        "nvrtcCreateProgram",
        source,
        name.encode(),
        len(headers),
        list(headers.values()),
        [spelling.encode() for spelling in headers],
    )
    try:
        failure: CompileError | None = None
        try:
            _nvrtc_call("nvrtcCompileProgram", program, len(options), [o.encode() for o in options])
        except CompileError as error:
            failure = error
        # NVRTC writes into the bytes objects made here, which no other code has seen yet.
        log = bytes(_nvrtc_call("nvrtcGetProgramLogSize", program))
        _nvrtc_call("nvrtcGetProgramLog", program, log)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if failure is not None:
            raise CompileError(
                f"{name} ({' '.join(options)}): {failure}\n{text}", text
            ) from failure
        code = bytes(_nvrtc_call(f"nvrtcGet{form}Size", program))
        _nvrtc_call(f"nvrtcGet{form}", program, code)
        return code, text
    finally:
        _nvrtc_call("nvrtcDestroyProgram", program)
