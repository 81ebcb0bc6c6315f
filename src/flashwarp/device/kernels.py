"""The kernels of a device: loading them, and launches, prepared once and made again."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashwarp import endings
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp.device.foreign import stream_handle
from flashwarp.errors import ArgumentError, DeviceError
from flashwarp.policy import CLOCK, Policy

if TYPE_CHECKING:
    from flashwarp import _native
    from flashwarp._jit.compiler import Source

_PREPARED_MAX = 256


class PreparedLaunch(ABC):
    """A prepared launch; see `Device.prepare`.

    Attributes
    ----------
    plan : Plan
        The same for the extension, which launches it without Python.
    """

    plan: _native.Plan

    @abstractmethod
    def __call__(
        self,
        arguments: Sequence[bytes],
        stream: int | None,
        uses: Sequence[object] = (),
    ) -> None:
        """Launch it."""

    @abstractmethod
    def refuse(self, result: int, stream: int, call: str) -> None:
        """Raise why a call for a launch has failed; the extension asks for it."""

    def among(
        self,
        arguments: tuple[bytes, ...],
        stream: int,
        others: tuple[int, ...],
        *,
        both_ways: bool = False,
        arrays: Sequence[_native.RowCalls] = (),
    ) -> bool:
        """Launch it on a GPU's stream, after the present work of others.

        With `both_ways` their later work waits for the launch, too. It loads from `arrays`, in
        their turns and orders, which note that the stream has work. Returns False, and does
        nothing, if one of these streams is being captured.
        """
        raise NotImplementedError


class Kernels(ABC):
    """The part of a device that loads and launches kernels."""

    name: str
    kind: str

    warps_at_once: int = 1
    """So many warps keep the device's memory busy if each copies one line at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = endings.Lock()
        self._built_in: dict[Policy, dict[str, LoadedKernel]] = {}
        self._programs: dict[str, LoadedProgram] = {}
        # Launches know their device, so it must not keep them.
        self._kernels: weakref.WeakValueDictionary[Policy, BuiltInKernels] = (
            weakref.WeakValueDictionary()
        )

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise ClosedError, or in a forked child ForkError, if kernels cannot be launched."""

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
        self._check_usable()
        if key not in self._programs:
            self._programs[key] = load()
        return self._programs[key]

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
        """Launch a kernel of a loaded program. Returns at once on a GPU, when done on the CPU.

        Parameters
        ----------
        kernel : LoadedKernel
        arguments : sequence of bytes
            The bytes of the kernel's parameters, copied before this returns.
        warps : int, optional
            How many warps have something to do. The launch has at most as many as the device runs
            at a time, so kernels loop; that many by default. If 0 or less, nothing is launched.
        block_threads : int
            Threads of a block, a multiple of 32.
        stream : object, optional
            Where it is queued; see `stream_handle`. Default: the library's own stream.
        uses : sequence
            Objects that a launch on the CPU holds until it ends: owners of memory, and native
            controllers, whose commands the launch's waiting threads serve.
        """
        handle = None if stream is None or self.kind == "cpu" else stream_handle(stream)
        self.prepare(kernel, warps, block_threads)(arguments, handle, uses)

    def block_threads_for(self, warps: int) -> int:  # noqa: ARG002
        """Return into how large blocks this many warps are best divided."""
        return 256

    @abstractmethod
    def prepare(
        self, kernel: LoadedKernel, warps: int | None, block_threads: int = 256
    ) -> PreparedLaunch:
        """Prepare launches of one kernel and one size, for callers that repeat them.

        `warps` and `block_threads` are those of `run_kernel`.

        What is returned is called with the bytes of each parameter, the handle of a stream (None:
        the library's own), and `uses` as `run_kernel` takes them.
        """


class BuiltInKernels:
    """Launches of the built-in kernels on caches of one policy; see `Device.kernels_for`."""

    def __init__(self, device: Kernels, policy: Policy) -> None:
        self._device = device
        self._policy = policy
        # More warps than any GPU runs at a time make no other launch.
        self._warps_max = 1 << 31 if device.kind == "cpu" else 8 * device.warps_at_once
        self._prepared: dict[object, PreparedLaunch] = {}

    def launch_of(
        self, name: str, warps: int, param_bytes: int, block_threads: int | None = None
    ) -> PreparedLaunch:
        """Return the launch of a kernel by so many warps; default: in blocks that spread few."""
        warps = min(warps, self._warps_max)
        key = name, warps, param_bytes, block_threads
        found = self._prepared.get(key)
        if found is None:
            device = self._device
            kernel = device.built_in(name, self._policy, param_bytes)
            threads = block_threads or device.block_threads_for(warps)
            found = device.prepare(kernel, warps, threads)
            if len(self._prepared) >= _PREPARED_MAX:
                self._prepared.clear()
            self._prepared[key] = found
        return found
