"""What a device makes of a program: its kernels, loaded, and what is known of their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashwarp._jit import spelling

if TYPE_CHECKING:
    from flashwarp._jit.compiler import KernelResources


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel that a device can run.

    Attributes
    ----------
    symbol : str
        Its mangled name, which tells the types of its parameters.
    param_bytes : tuple of int
        The size of each parameter.
    element_bytes : tuple of int
        For each parameter the size of what an array or pointer leads to; 0 where nobody knows.
    resources : KernelResources or None
        What it uses on a GPU.
    handle : object
        The device's own.
    """

    symbol: str
    param_bytes: tuple[int, ...]
    element_bytes: tuple[int, ...]
    resources: KernelResources | None
    handle: Any


@dataclass(frozen=True)
class LoadedProgram:
    """All kernels of a program; loaded until the device is closed."""

    kernels: tuple[LoadedKernel, ...]
    log: str
    from_cache: bool
    owner: Any

    def by_name(self) -> dict[str, LoadedKernel]:
        """Return the kernels by their names, with their namespaces."""
        return {
            spelling.split_signature(spelling.demangle(kernel.symbol))[0]: kernel
            for kernel in self.kernels
        }
