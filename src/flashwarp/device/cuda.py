"""`CudaDevice`: a GPU, its memory, kernels and streams, through the calls of `_jit/driver.py`."""

# `Device` documents the methods; some devices do not need all arguments.
# ruff: noqa: ARG002, D102
from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwarp import _native, endings
from flashwarp._jit import cuda_context, driver, spelling
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp._waiting import saying_if_slow
from flashwarp.device.base import Device, quietly
from flashwarp.device.foreign import ArrayView, Stream, stream_handle
from flashwarp.device.kernels import PreparedLaunch
from flashwarp.device.memory import (
    DeviceMemory,
    Exported,
    MemoryInfo,
    Owned,
    OwnedStream,
    Registration,
    align_up,
    check_alignment,
    positive,
)
from flashwarp.device.streams import Event
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    FlashwarpError,
)

if TYPE_CHECKING:
    from flashwarp._jit.compiler import Artifact, Source
    from flashwarp.policy import Policy

_log = logging.getLogger(__name__)

_WARP_THREADS = 32
# What a drive's memory map is made of.
_PAGE_BYTES = 4096
_BLOCK_THREADS = 256

# A wait asks without a pause for this long: most waits of the library end within it.
_POLL_S = 200e-6


class CudaDevice(Device):
    """A GPU, in the primary context that it shares with torch and others.

    Parameters
    ----------
    ordinal : int
        Its number among the GPUs that CUDA_VISIBLE_DEVICES allows.

    Notes
    -----
    The first launch loads all built-in kernels, if the package has them compiled for this GPU.
    Otherwise the first launch of each compiles it, unless it is on disk.
    """

    kind = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__()
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        with saying_if_slow(_log, "opening %s", self.name):
            self.context = driver.Context(ordinal)
        self._stream = Stream(self.context.create_stream())
        self.context.calls.set_own(self._stream.handle)
        self.warps_at_once = self.context.multiprocessors * 8
        # Marks the end of a stream for as long as `order` needs it.
        self._mark = self.context.create_event(timing=False)

    @functools.cached_property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, such as "sm_90"."""
        from flashwarp._jit import compiler  # slow to import, and CPU devices need none

        return compiler.architecture(self.context.compute_capability)

    # Memory.

    def allocate(self, nbytes: int, stream: object = None) -> DeviceMemory:
        address = self.context.allocate(positive(nbytes))
        release = self.context.releasing("cuMemFree", address)
        memory = DeviceMemory(self, address, nbytes, release, on_host=False)
        self.fill(address, 0, nbytes, stream)
        return memory

    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        check_alignment(alignment)
        # The driver places several small allocations in one page, so it aligns none of them.
        slack = alignment
        base = self.context.allocate_host(positive(nbytes) + slack)
        release = self.context.releasing("cuMemFreeHost", base)
        ctypes.memset(base, 0, nbytes + slack)
        return DeviceMemory(self, align_up(base, alignment), nbytes, release, on_host=True)

    def allocate_exported(self, nbytes: int) -> Exported:
        address, size, descriptor = self.context.allocate_exported(positive(nbytes))
        release = functools.partial(self.context.unmap_exported, address, size)
        memory = DeviceMemory(self, address, nbytes, release, on_host=False)
        self.fill(address, 0, nbytes)
        return Exported(memory, descriptor, 0)

    def allocate_across(
        self, gpus: Sequence[int], users: Sequence[CudaDevice], nbytes: int
    ) -> tuple[DeviceMemory, list[int]]:
        """Allocate zeroed memory, an equal part on each of `gpus`, that all `users` use.

        Returns it and a descriptor of each part, for `map_across` in other processes; the caller
        closes them.
        """
        contexts = [each.context for each in users]
        made, descriptors = self.context.allocate_across(gpus, contexts, positive(nbytes))
        own = {each.ordinal: each for each in users}
        for i, gpu in enumerate(gpus):
            own.get(gpu, self).fill(made.address + i * made.part, 0, made.part)
        return DeviceMemory(self, made.address, nbytes, made.free, on_host=False), descriptors

    def map_across(
        self,
        descriptors: Sequence[int],
        gpus: Sequence[int],
        users: Sequence[CudaDevice],
        nbytes: int,
    ) -> DeviceMemory:
        """Map memory that another process has allocated by `allocate_across`."""
        contexts = [each.context for each in users]
        made = self.context.map_across(descriptors, gpus, contexts, positive(nbytes))
        return DeviceMemory(self, made.address, nbytes, made.free, on_host=False)

    def map_exported(self, descriptor: int, nbytes: int) -> DeviceMemory:
        writable = False
        try:
            address, size = self.context.map_exported(descriptor, positive(nbytes))
        except DeviceOutOfMemory:
            raise
        except DeviceError as error:
            # A driver may map nothing read-only. Then only our kernels' care protects the memory.
            address, size = self.context.map_exported(descriptor, nbytes, writable=True)
            writable = True
            _log.warning("%s maps another process's memory writable: %s", self.name, error)
        release = functools.partial(self.context.unmap_exported, address, size)
        memory = DeviceMemory(self, address, nbytes, release, on_host=False)
        memory.writable = writable
        return memory

    @property
    def identity(self) -> str:
        return self.context.uuid

    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        self.context.register_host(address, positive(nbytes), read_only)
        release = self.context.releasing("cuMemHostUnregister", address)
        return Registration(self, address, nbytes, release)

    def register_io(self, address: int, nbytes: int) -> Registration:
        """Let kernels store to another device's registers, which the process has mapped.

        The result's address is the kernels'. Close it before the mapping ends.
        """
        on_device = self.context.register_io(address, positive(nbytes))
        release = self.context.releasing("cuMemHostUnregister", address)
        return Registration(self, on_device, nbytes, release)

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        """Return a descriptor of the pages of device memory that hold a range, as a dma-buf.

        Its first byte is that of the first page. The caller closes it.
        """
        begin = address // _PAGE_BYTES * _PAGE_BYTES
        end = align_up(address + positive(nbytes), _PAGE_BYTES)
        return self.context.export_dma_buf(begin, end - begin)

    def _copy_in(self, target: int, source: int, nbytes: int, stream: object) -> None:
        self._queue("cuMemcpyHtoDAsync", target, source, nbytes, stream)

    def _copy_out(self, target: int, source: int, nbytes: int, stream: object) -> None:
        self._queue("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def fill(self, address: int, byte: int, nbytes: int, stream: object = None) -> None:
        self._queue("cuMemsetD8Async", address, byte, nbytes, stream)

    def clear(self, address: int, nbytes: int, stream: object) -> None:
        self.context.fill(address, 0, nbytes // 4, self._handle(stream))

    def _queue(self, call: str, target: int, source: int, nbytes: int, stream: object) -> None:
        """Queue a copy, or the filling with the byte `source`, and wait for it."""
        if nbytes:
            # For pageable memory the driver waits for the work before the copy, without a time
            # limit. So wait for that work here, with one.
            self.wait(stream)
            self.context.call(call, target, source, nbytes, self._handle(stream))
            self.wait(stream)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(*self.context.memory_info())

    # Kernels.

    def _blocks(
        self,
        module: driver.Module,
        kernel: cuda_context.Kernel,
        warps: int | None,
        block_threads: int,
    ) -> int:
        """Count the blocks to launch: at most as many as run at a time."""
        if block_threads <= 0 or block_threads % _WARP_THREADS:
            raise ArgumentError(f"block_threads={block_threads} is not a positive multiple of 32")
        resident = self._resident_blocks(module, kernel, block_threads)
        useful = resident if warps is None else -(-warps * _WARP_THREADS // block_threads)
        return max(0, min(useful, resident))

    def _resident_blocks(
        self, module: driver.Module, kernel: cuda_context.Kernel, block_threads: int
    ) -> int:
        """Count the blocks of a kernel that the whole GPU runs at a time."""
        blocks = module.resident_blocks(kernel, block_threads)
        if blocks == 0:
            raise DeviceError(
                f"kernel {kernel.name} cannot run with {block_threads} threads a block: it uses "
                f"{kernel.registers} registers and allows {kernel.threads_max} threads"
            )
        return blocks * self.context.multiprocessors

    def resident_threads(self, kernel: LoadedKernel, block_threads: int = 256) -> int:
        """Count the threads of a kernel that the whole GPU runs at a time."""
        module, function = kernel.handle
        return self._resident_blocks(module, function, block_threads) * block_threads

    def _compile(
        self, source: Source, include_dirs: Sequence[Path], options: Sequence[str], debug: bool
    ) -> tuple[str, Callable[[], LoadedProgram]]:
        from flashwarp._jit import compiler

        debugged = ("-lineinfo", "-DFW_DEBUG=1") if debug else ()
        how: dict[str, Any] = {
            "include_dirs": (*include_dirs, compiler.INCLUDE_DIR),
            "options": (*compiler.PROGRAM_OPTIONS, *debugged, *options),
        }
        artifact = compiler.compile_source(self.arch, source, **how)
        # For each parameter of each kernel, the element type if the program defines it.
        elements = {each: _own_elements(spelling.demangle(each)) for each in artifact.kernels}
        unknown = sorted({each for types in elements.values() for each in types if each})
        sizes = compiler.type_sizes(self.arch, source, unknown, **how) if unknown else {}
        element_bytes = {
            symbol: tuple(sizes.get(each, 0) for each in types)
            for symbol, types in elements.items()
        }
        return artifact.key, functools.partial(self._loaded, artifact, element_bytes)

    def _load_built_in(self, name: str, policy: Policy) -> dict[str, LoadedKernel]:
        from flashwarp._jit import precompiled

        artifact = precompiled.find(self.context.compute_capability, policy)
        if artifact is None:
            return super()._load_built_in(name, policy)
        # Each takes one struct.
        load = functools.partial(self._loaded, artifact, dict.fromkeys(artifact.kernels, (0,)))
        loading = functools.partial(self._load, artifact.key, load)
        return endings.holding([self._lock], loading).by_name()

    def _loaded(
        self, artifact: Artifact, element_bytes: dict[str, tuple[int, ...]]
    ) -> LoadedProgram:
        module = driver.Module(self.context, artifact.cubin, tuple(artifact.kernels))
        kernels = tuple(
            LoadedKernel(
                symbol=symbol,
                param_bytes=resources.each_param_bytes,
                element_bytes=element_bytes[symbol],
                resources=resources,
                handle=(module, module.kernels[symbol]),
            )
            for symbol, resources in artifact.kernels.items()
        )
        return LoadedProgram(kernels, artifact.log, artifact.from_cache, module)

    def block_threads_for(self, warps: int) -> int:
        # Each of a few warps runs faster on an SM of its own.
        spread = _WARP_THREADS * -(-warps // self.context.multiprocessors)
        return max(_WARP_THREADS, min(_BLOCK_THREADS, spread))

    def prepare(
        self, kernel: LoadedKernel, warps: int | None, block_threads: int = _BLOCK_THREADS
    ) -> PreparedLaunch:
        module, function = kernel.handle
        blocks = self._blocks(module, function, warps, block_threads)
        return _CudaLaunch(self, function, blocks, block_threads)

    @functools.cached_property
    def launching(self) -> _native.Launching:
        """What the extension launches with."""
        own, mark = self._stream.handle, self._mark
        return _native.Launching(self.context.calls, own, mark, self.context.ordinal)

    # Captures.

    def capture(self, stream: object) -> int | None:
        return self.context.capture(stream if type(stream) is int else self._handle(stream))

    def capture_call(self, stream: object, call: _native.WakeCall) -> None:
        self.context.capture_call(self._handle(stream), call.function, call.argument)

    def capture_count(self, stream: object, graphs: _native.CudaGraphs) -> None:
        self.context.capture_count(self._handle(stream), graphs)

    def refuse_capture(self, what: str, instead: str) -> None:
        for library in ("torch", "cupy"):
            if library in sys.modules and self.capture(self.current_stream(library)) is not None:
                raise CaptureError(
                    f"{what} cannot become part of the CUDA graph that {library}'s current stream "
                    f"is being captured into: {instead}"
                )

    # Streams.

    def _handle(self, stream: object) -> int:
        return self._stream.handle if stream is None else stream_handle(stream)

    def default_stream(self) -> Stream:
        self.context.calls.note_own(always=True)
        return self._stream

    def own_stream(self) -> int:
        return self._stream.handle

    def note_served(self, stream: int | None) -> None:
        self.context.note_served(self._stream.handle if stream is None else stream)

    def view(self, array: object) -> ArrayView:
        seen = super().view(array)
        if seen.library not in ("numpy", "torch"):
            self.context.calls.note_own(always=False)  # its producer may wait there
        return seen

    def create_stream(self) -> OwnedStream:
        handle = self.context.create_stream()
        return OwnedStream(self, handle, self.context.releasing("cuStreamDestroy", handle))

    def current_stream(self, library: str) -> Stream:
        module = sys.modules.get(library)
        if module is None or getattr(module, "cuda", None) is None:  # or still being imported
            return self._stream
        if library == "torch":
            # Without an object of torch, which would take microseconds.
            raw = getattr(module._C, "_cuda_getCurrentRawStream", None)
            if raw is None:  # built without CUDA
                return self._stream
            if module.cuda.is_initialized():
                return Stream(raw(self.ordinal))
            return Stream(int(module.cuda.current_stream(self.ordinal).cuda_stream))
        if library == "cupy":
            with contextlib.suppress(TypeError):  # of older versions, which take no device
                return Stream(int(module.cuda.get_current_stream(self.ordinal).ptr))
            with module.cuda.Device(self.ordinal):
                return Stream(int(module.cuda.get_current_stream().ptr))
        return self._stream

    def order(self, before: object, after: object) -> None:
        first = before if type(before) is int else self._handle(before)
        second = after if type(after) is int else self._handle(after)
        if first == second:
            return
        self.context.order(first, second, self._mark)

    def wait(self, stream: object = None, timeout_s: float | None = None) -> None:
        handle = self._handle(stream)
        if self.context.stream_done(handle, poll_s=_POLL_S):
            return
        done = functools.partial(self.context.stream_done, handle)
        cuda_context.wait_until(done, timeout_s, f"stream {handle:#x} of {self.name}")

    def done(self, stream: object) -> bool:
        return self.context.stream_done(self._handle(stream))

    def idle(self) -> bool:
        libraries = (self.current_stream(each).handle for each in ("torch", "cupy"))
        try:
            return all(
                self.context.capture(each) is None and self.context.stream_done(each)
                for each in {self._stream.handle, *libraries}
            )
        except FlashwarpError:  # nothing runs after a fault
            return True

    def alive(self) -> bool:
        try:
            self.context.stream_done(self._stream.handle)
        except (DeviceError, ClosedError):
            return False
        return True

    def event(self) -> Event:
        return _CudaEvent(self)

    def mark(self, stream: object) -> Event:
        return _Mark(self.context, self._handle(stream))

    def wait_any(self, events: Sequence[Event], seconds: float) -> None:
        self.context.wait_any([event.handle for event in events], seconds)

    def end_calls(self, queues: list[Any]) -> int:
        return self.context.end_calls(queues)

    def describe(self) -> str:
        major, minor = self.context.compute_capability
        gib = self.memory_info().total_bytes / (1 << 30)
        return (
            f"{self.name} ({self.context.model}, compute capability {major}.{minor}, "
            f"{self.context.multiprocessors} multiprocessors, {gib:.0f} GiB)"
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Close arrays and caches, wait for the library's stream, then release everything.

        May be called twice. If the stream does not end in time, raises DeviceTimeout and releases
        nothing more: freeing memory under a running kernel would wait without a limit.
        """
        if not self._closed and self.context.usable:
            self._wait_before_close(timeout_s)
        super().close()

    def _release(self) -> None:
        with self._lock:
            if self._closed:
                return
            self.launching.closed = True
            super()._release()
            if self.context.usable:
                self._close_context()

    def _wait_before_close(self, timeout_s: float | None) -> None:
        try:
            self.wait(timeout_s=timeout_s)
        except DeviceTimeout:
            raise
        except DeviceError as error:
            _log.warning("closing %s after a fault: %s", self.name, error)

    def _close_context(self) -> None:
        for program in self._programs.values():
            quietly(program.owner.close)
        self._programs.clear()
        quietly(self.context.releasing("cuEventDestroy", self._mark))
        quietly(self.context.releasing("cuStreamDestroy", self._stream.handle))
        quietly(self.context.close)


class _CudaLaunch(PreparedLaunch):
    def __init__(
        self, device: CudaDevice, kernel: cuda_context.Kernel, blocks: int, block_threads: int
    ) -> None:
        self._device = device
        self._context = device.context
        self._size = kernel, blocks, block_threads
        self.plan = _native.Plan.on_gpu(kernel.handle, blocks, block_threads)

    def __call__(
        self,
        arguments: Sequence[bytes],
        stream: int | None,
        uses: Sequence[object] = (),
    ) -> None:
        self._device._check_open()
        if not self._size[1]:
            return
        handle = self._device._stream.handle if stream is None else stream
        self._context.launch(*self._size, arguments, handle)

    def refuse(self, result: int, stream: int, call: str) -> None:
        if call != "cuLaunchKernel":
            self._context.require(result, call)
        self._context.refuse_launch(result, *self._size, stream)

    def among(
        self,
        arguments: tuple[bytes, ...],
        stream: int,
        others: tuple[int, ...],
        *,
        both_ways: bool = False,
        arrays: Sequence[_native.RowCalls] = (),
    ) -> bool:
        self._device._check_open()
        launching = self._device.launching
        return _native.launch_among(launching, self, arguments, stream, others, both_ways, arrays)


class _Mark(Event):
    """An event of the context's pool, which destroys it at the end."""

    def __init__(self, context: driver.Context, stream: int) -> None:
        self._context = context
        self.handle = context.take_event()
        self.record(stream)

    def record(self, stream: object = None) -> None:
        self._context.record(self.handle, stream_handle(stream))

    def done(self) -> bool:
        return self._context.event_done(self.handle)

    def before(self, stream: object) -> None:
        self._context.call("cuStreamWaitEvent", stream_handle(stream), self.handle, 0)

    def elapsed_ms(self, start: Event) -> float:
        raise ArgumentError("a mark measures no time: use Device.event")

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            self._context.give_event(handle)


class _CudaEvent(Owned, Event):
    def __init__(self, device: CudaDevice) -> None:
        self._context = device.context
        self._cuda = device
        self.handle = self._context.create_event(timing=True)
        Owned.__init__(self, device, self._context.releasing("cuEventDestroy", self.handle))

    def record(self, stream: object = None) -> None:
        self._context.record(self.handle, self._cuda._handle(stream))

    def done(self) -> bool:
        return self._context.event_done(self.handle)

    def before(self, stream: object) -> None:
        self._context.call("cuStreamWaitEvent", self._cuda._handle(stream), self.handle, 0)

    def elapsed_ms(self, start: Event) -> float:
        if not isinstance(start, _CudaEvent) or start.device is not self.device:
            raise ArgumentError("both events must come from one device")
        return float(self._context.call("cuEventElapsedTime", start.handle, self.handle))


def _own_elements(signature: str) -> tuple[str, ...]:
    types = spelling.split_signature(signature)[1]
    found = [spelling.elements_of(each) for each in types]
    known = {"void", *spelling.NUMBERS}
    return tuple("" if each is None or each.type in known else each.type for each in found)
