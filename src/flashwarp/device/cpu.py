"""`CpuDevice`: the CPU as a device, a warp being one thread of a pool."""

# `Device` documents the methods; some devices do not need all arguments.
# ruff: noqa: ARG002, D102
from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashwarp import _native, config, endings
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp.config import integer
from flashwarp.device import host_memory, shared_memory
from flashwarp.device.base import Device
from flashwarp.device.foreign import Stream
from flashwarp.device.kernels import PreparedLaunch
from flashwarp.device.memory import (
    DeviceMemory,
    Exported,
    MemoryInfo,
    OwnedStream,
    Registration,
    check_alignment,
    host_only,
    positive,
)
from flashwarp.device.shared_memory import HUGE_PAGE_BYTES
from flashwarp.device.streams import Event
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    FlashwarpError,
    ForkError,
)
from flashwarp.policy import Policy

if TYPE_CHECKING:
    from flashwarp._jit.compiler import Source
    from flashwarp._jit.host_compiler import HostArtifact

# Transparent huge pages come in this size.
_THREADS_MAX = 1024


_with_threads: weakref.WeakSet[CpuDevice] = weakref.WeakSet()


@endings.at_exit
def _end_threads() -> None:
    """Wait for launches of daemon threads, for which the interpreter does not wait."""
    for device in list(_with_threads):
        device._pool.close()


os.register_at_fork(after_in_child=_with_threads.clear)


class CpuDevice(Device):
    """Runs the same kernels on host threads, a warp being one thread.

    Parameters
    ----------
    threads : int, optional
        Default: every core this process may use; at most 1024.
    """

    name = "cpu"
    kind = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        threads = config.cores() if threads is None else threads
        self.threads = integer("threads", threads, 1, _THREADS_MAX)
        self._pid = os.getpid()

    @functools.cached_property
    def _pool(self) -> _native.CpuPool:
        try:
            pool = _native.CpuPool(self.threads)
        except RuntimeError as error:
            raise DeviceError(
                f"{self.threads} threads of the CPU device cannot be started ({error}): raise the "
                "limit of processes (ulimit -u), or give the device fewer"
            ) from error
        _with_threads.add(self)
        return pool

    def allocate(self, nbytes: int, stream: object = None) -> DeviceMemory:
        return self.allocate_host(
            positive(nbytes), HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 4096
        )

    def allocate_host(self, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        check_alignment(alignment)
        return host_only(self, nbytes, alignment)

    def allocate_exported(self, nbytes: int) -> Exported:
        descriptor, mapped = shared_memory.create(positive(nbytes), read_only=True)
        memory = self._memory_of(mapped)
        if nbytes >= HUGE_PAGE_BYTES:
            take = shared_memory.take_huge_pages
            with contextlib.suppress(RuntimeError):  # no thread is left: small pages will do
                endings.Thread(take, "flashwarp huge pages", memory.owners, nbytes).start()
        return Exported(memory, descriptor, 0)

    def map_exported(self, descriptor: int, nbytes: int) -> DeviceMemory:
        memory = self._memory_of(shared_memory.map_memory(descriptor, nbytes, writable=False))
        memory.writable = False
        return memory

    def _memory_of(self, mapped: shared_memory.Mapped) -> DeviceMemory:
        # The mapping ends when the last of its owners is gone.
        owners: list[object] = [mapped.owner]
        return DeviceMemory(
            self, mapped.address, mapped.nbytes, owners.clear, on_host=True, owners=owners
        )

    def register_host(self, address: int, nbytes: int, read_only: bool) -> Registration:
        return Registration(self, address, positive(nbytes), lambda: None)

    def _copy_in(self, target: int, source: int, nbytes: int, stream: object) -> None:
        ctypes.memmove(target, source, nbytes)

    _copy_out = _copy_in

    def fill(self, address: int, byte: int, nbytes: int, stream: object = None) -> None:
        ctypes.memset(address, byte, nbytes)

    def clear(self, address: int, nbytes: int, stream: object) -> None:
        self.fill(address, 0, nbytes, stream)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(host_memory.available_bytes(), host_memory.total_bytes())

    def _load_built_in(self, name: str, policy: Policy) -> dict[str, LoadedKernel]:
        # All kernels at once: the wheel has them compiled for its own policies, under plain names.
        # For other policies g++ compiles all of them in the time of one or two.
        if not policy.built_in:
            from flashwarp._jit import compiler  # slow to import, and the wheel's need none

            source, options = compiler.built_in(policy)
            return self.load_program(source, options=options).by_name()
        path = Path(_native.__file__).parent / "policies" / f"{policy.name}.so"
        try:
            program = _native.CpuProgram.installed(str(path))
        except RuntimeError as error:
            raise DeviceError(
                f"the kernels of policy {policy.name!r} cannot be loaded ({error}): install the "
                "wheel again"
            ) from error
        return {kernel.symbol: kernel for kernel in _kernels_of(program)}

    def _ended(self, error: RuntimeError) -> Exception:
        """Return the error of a launch; another thread may have closed the device meanwhile."""
        try:
            self._check_usable()
        except (ClosedError, ForkError) as why:
            return why
        return DeviceError(f"launch on the CPU: {error}")

    def _check_usable(self) -> None:
        self._check_open()
        if os.getpid() != self._pid:
            raise ForkError(
                f"this CPU device belongs to process {self._pid}: a forked child must open its own"
            )

    def _compile(
        self, source: Source, include_dirs: Sequence[Path], options: Sequence[str], debug: bool
    ) -> tuple[str, Callable[[], LoadedProgram]]:
        # Slow to import, and the built-in kernels need no compiler.
        from flashwarp._jit.compiler import INCLUDE_DIR
        from flashwarp._jit.host_compiler import compile_host

        folders = (*include_dirs, INCLUDE_DIR)
        artifact = compile_host(source, include_dirs=folders, options=options, debug=debug)
        return artifact.key, functools.partial(_load_host_program, artifact)

    def prepare(
        self, kernel: LoadedKernel, warps: int | None, block_threads: int = 256
    ) -> PreparedLaunch:
        self._check_usable()
        return _CpuLaunch(self, kernel, warps)

    def _release(self) -> None:
        with self._lock:
            self._closed = True
            # Waits for a running launch, and ends the threads.
            if "_pool" in self.__dict__:
                self._pool.close()
            self._programs.clear()
            super()._release()

    def default_stream(self) -> Stream:
        return Stream(0)

    def create_stream(self) -> OwnedStream:
        return OwnedStream(self, 0, lambda: None)

    def current_stream(self, library: str) -> Stream:
        return Stream(0)

    def order(self, before: object, after: object) -> None:
        pass

    def wait(self, stream: object = None, timeout_s: float | None = None) -> None:
        pass

    def event(self) -> Event:
        return _CpuEvent()

    def describe(self) -> str:
        return f"cpu ({self.threads} threads)"


class _CpuLaunch(PreparedLaunch):
    def __init__(self, device: CpuDevice, kernel: LoadedKernel, warps: int | None) -> None:
        self._device = device
        program, index = kernel.handle
        self._threads = device.threads if warps is None else min(warps, device.threads)
        self.plan = _native.Plan.on_cpu(device._pool, program, index, max(0, self._threads))

    def __call__(
        self,
        arguments: Sequence[bytes],
        stream: int | None,
        uses: Sequence[object] = (),
    ) -> None:
        device = self._device
        device._check_usable()
        if self._threads <= 0:
            return
        try:
            self.plan.run(arguments, uses)
        except FlashwarpError:
            raise
        except RuntimeError as error:
            raise device._ended(error) from error

    def refuse(self, result: int, stream: int, call: str) -> None:
        raise self._device._ended(RuntimeError("its threads were ended"))


class _CpuEvent(Event):
    """An event on the CPU, where launches end before they return: the time of its record."""

    def __init__(self) -> None:
        self._recorded_ns = 0

    def record(self, stream: object = None) -> None:
        self._recorded_ns = time.perf_counter_ns()

    def done(self) -> bool:
        return True

    def before(self, stream: object) -> None:
        pass

    def elapsed_ms(self, start: Event) -> float:
        if not isinstance(start, _CpuEvent):
            raise ArgumentError("both events must come from one device")
        return (self._recorded_ns - start._recorded_ns) * 1e-6


def _load_host_program(artifact: HostArtifact) -> LoadedProgram:
    try:
        program = _native.CpuProgram(artifact.library)
    except RuntimeError as error:
        raise DeviceError(f"the compiled program cannot be loaded: {error}") from error
    return LoadedProgram(_kernels_of(program), artifact.log, artifact.from_cache, program)


def _kernels_of(program: _native.CpuProgram) -> tuple[LoadedKernel, ...]:
    return tuple(
        LoadedKernel(
            symbol=symbol,
            param_bytes=tuple(nbytes for nbytes, _ in params),
            element_bytes=tuple(element for _, element in params),
            resources=None,
            handle=(program, index),
        )
        for index, (symbol, params) in enumerate(program.kernels)
    )
