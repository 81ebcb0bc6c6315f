"""`CpuDevice`: the CPU as a device, a warp being one thread of a pool."""

# The methods of a device are documented in `Device`, and some devices need not all their arguments.
# ruff: noqa: ARG002, D102
from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from flashwarp import host_memory
from flashwarp._jit import compiler, host_compiler
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp.device.base import TIMEOUT_S, Device, Event, Stream
from flashwarp.device.memory import (
    DeviceMemory,
    MemoryInfo,
    OwnedStream,
    Registration,
    align_up,
    check_alignment,
    host_bytes,
    positive,
)
from flashwarp.errors import ArgumentError, DeviceError, DeviceOutOfMemory, ForkError
from flashwarp.policy import CLOCK, Policy

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# Transparent huge pages come in this size, and so do the largest alignments anybody asks for.
_HUGE_PAGE_BYTES = 2 << 20


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
        self._programs: dict[str, LoadedProgram] = {}
        self._kernels_by_policy: dict[Policy, dict[str, LoadedKernel]] = {}

    @functools.cached_property
    def _pool(self) -> Any:
        return _native().CpuPool(self.threads)

    def allocate(self, nbytes: int, stream: object = None) -> DeviceMemory:
        return self.allocate_host(nbytes, _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else 4096)

    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        check_alignment(alignment)
        slack = alignment if alignment > mmap.PAGESIZE else 0
        try:
            mapping = mmap.mmap(
                -1, positive(nbytes) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise DeviceOutOfMemory(f"allocating {nbytes} bytes of host memory: {error}") from error
        if nbytes >= _HUGE_PAGE_BYTES:
            # Random lines of a large cache miss the TLB on almost every access with 4 KiB pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return DeviceMemory(self, align_up(base, alignment), nbytes, mapping.close, on_host=True)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        return Registration(self, address, positive(nbytes), lambda: None)

    def upload(
        self, address: int, data: ReadableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        source = host_bytes(data, writable=False)
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def download_into(
        self, address: int, target: WriteableBuffer | npt.NDArray[Any], stream: object = None
    ) -> None:
        destination = host_bytes(target, writable=True)
        ctypes.memmove(destination.ctypes.data, address, destination.nbytes)

    def fill(self, address: int, byte: int, nbytes: int, stream: object = None) -> None:
        ctypes.memset(address, byte, nbytes)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(host_memory.available_bytes(), host_memory.total_bytes())

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
        policy: Policy = CLOCK,
    ) -> None:
        self._check_usable()
        if warps <= 0:
            return
        struct, threads = bytes(params), min(warps, self.threads)
        try:
            if policy == CLOCK:
                self._pool.launch(f"fw_{name}", struct, threads, list(serve))
            else:
                program, index = self._policy_kernels(policy)[f"fw_{name}"].handle
                self._pool.launch_program(program, index, [struct], threads, list(serve))
        except (KeyError, ValueError) as error:
            raise ArgumentError(f"launch of {name} on the CPU: {error.args[0]}") from error

    def _policy_kernels(self, policy: Policy) -> dict[str, LoadedKernel]:
        """Find the built-in kernels with another policy: in the wheel, or compiled now."""
        with self._lock:
            found = self._kernels_by_policy.get(policy)
            if found is None:
                program = self._load_policy(policy)
                # A compiled program's names are mangled, those of the wheel's are not.
                demangle = _native().demangle
                found = {
                    (demangle(kernel.symbol) or kernel.symbol).partition("(")[0]: kernel
                    for kernel in program.kernels
                }
                self._kernels_by_policy[policy] = found
        return found

    def _load_policy(self, policy: Policy) -> LoadedProgram:
        if not policy.built_in:
            source = compiler.Source.read(compiler.MODULE).behind(policy)
            return self.load_program(source, options=policy.options)
        native = _native()
        path = Path(native.__file__).parent / "policies" / f"{policy.name}.so"
        try:
            library = path.read_bytes()
        except OSError as error:
            raise DeviceError(
                f"the kernels of policy {policy.name!r} cannot be read ({error}): install the "
                "wheel again"
            ) from error
        return _load_host_program(native, library)

    def _check_usable(self) -> None:
        self._check_open()
        if os.getpid() != self._pid:
            raise ForkError(
                f"this CPU device belongs to process {self._pid}: a forked child must open its own"
            )

    def load_program(
        self,
        source: compiler.Source,
        *,
        include_dirs: Sequence[Path] = (),
        options: Sequence[str] = (),
        debug: bool = False,
    ) -> LoadedProgram:
        self._check_usable()
        native = _native()
        artifact = host_compiler.compile_host(
            source,
            include_dirs=(*include_dirs, compiler.INCLUDE_DIR),
            options=options,
            debug=debug,
        )
        with self._lock:
            self._check_open()
            if artifact.key not in self._programs:
                self._programs[artifact.key] = _load_host_program(
                    native, artifact.library, artifact.log, artifact.from_cache
                )
            return self._programs[artifact.key]

    def run_kernel(
        self,
        kernel: LoadedKernel,
        arguments: Sequence[bytes],
        *,
        warps: int | None = None,
        block_threads: int = 256,
        stream: object = None,
        serve: Sequence[int] = (),
    ) -> None:
        self._check_usable()
        threads = self.threads if warps is None else min(warps, self.threads)
        if threads <= 0:
            return
        program, index = kernel.handle
        self._pool.launch_program(program, index, list(arguments), threads, list(serve))

    def close(self) -> None:
        """Ends the threads and releases everything. May be called twice."""
        with self._lock:
            # Waits for a running launch. A forked child has none of its parent's threads.
            if "_pool" in self.__dict__ and os.getpid() == self._pid:
                self._pool.close()
            self._programs.clear()
            self._kernels_by_policy.clear()
            super().close()

    def default_stream(self) -> Stream:
        return Stream(0)

    def create_stream(self) -> OwnedStream:
        return OwnedStream(self, 0, lambda: None)

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

    def wait_on(self, stream: object) -> None:
        pass

    def elapsed_ms(self, start: Event) -> float:
        if not isinstance(start, _CpuEvent):
            raise ArgumentError("both events must come from one device")
        return (self._recorded_ns - start._recorded_ns) * 1e-6


def _native() -> Any:
    try:
        return importlib.import_module("flashwarp._native")
    except ImportError as error:
        raise DeviceError(
            f"flashwarp's native part cannot be imported ({error}): install the wheel again"
        ) from error


def _load_host_program(
    native: Any, library: bytes, log: str = "", from_cache: bool = True
) -> LoadedProgram:
    try:
        program = native.CpuProgram(library)
    except RuntimeError as error:
        raise DeviceError(f"the compiled program cannot be loaded: {error}") from error
    kernels = tuple(
        LoadedKernel(
            symbol=symbol,
            param_bytes=tuple(nbytes for nbytes, _ in params),
            element_bytes=tuple(element for _, element in params),
            resources=None,
            handle=(program, index),
        )
        for index, (symbol, params) in enumerate(program.kernels)
    )
    return LoadedProgram(kernels, log, from_cache, program)
