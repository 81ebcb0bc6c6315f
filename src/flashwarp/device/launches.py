"""Prepared launches. Those of built-in kernels are kept: callers repeat few sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from flashwarp.policy import Policy

if TYPE_CHECKING:
    from flashwarp import _native
    from flashwarp._jit import cuda_context
    from flashwarp._jit.program import LoadedKernel

__all__ = ["BuiltInKernels", "Launch"]

_PREPARED_MAX = 256


class Launch(ABC):
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
        end: cuda_context.End | None = None,
    ) -> None:
        """Launch it."""

    def after_own(self, arguments: tuple[bytes, ...], stream: int) -> bool:
        """Launch it on a GPU's stream, after what the library's own stream has queued.

        Returns False, and does nothing, if the stream is being captured.
        """
        raise NotImplementedError

    def refuse(self, result: int, stream: int) -> None:
        """Raise why the driver has refused it on a GPU's stream."""
        raise NotImplementedError

    def append_after(
        self,
        arguments: tuple[bytes, ...],
        others: tuple[int, ...],
        stream: int,
        end: cuda_context.End,
    ) -> bool:
        """Launch it on a GPU's stream after the present work of others, and mark its end.

        Returns False, and does nothing, if one of these streams is being captured. If an error is
        raised and `end` has its entry, the launch runs, and its end is not marked.
        """
        raise NotImplementedError

    def among(self, arguments: tuple[bytes, ...], others: tuple[int, ...]) -> bool:
        """Launch it on a GPU's own stream, between the present and the later work of others.

        Returns False, and does nothing, if one of these streams is being captured.
        """
        raise NotImplementedError


class Launcher(Protocol):
    """The part of a device that prepares launches."""

    kind: str
    warps_at_once: int

    def built_in(self, name: str, policy: Policy, param_bytes: int | None) -> LoadedKernel: ...

    def block_threads_for(self, warps: int) -> int: ...

    def prepare(self, kernel: LoadedKernel, warps: int | None, block_threads: int) -> Launch: ...


class BuiltInKernels:
    """Launches of the built-in kernels on caches of one policy; see `Device.kernels_for`."""

    def __init__(self, device: Launcher, policy: Policy) -> None:
        self._device = device
        self._policy = policy
        # More warps than any GPU runs at a time make no other launch.
        self._warps_max = 1 << 31 if device.kind == "cpu" else 8 * device.warps_at_once
        self._prepared: dict[object, Launch] = {}

    def launch_of(
        self, name: str, warps: int, param_bytes: int, block_threads: int | None = None
    ) -> Launch:
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
