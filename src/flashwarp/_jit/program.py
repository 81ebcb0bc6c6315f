"""Loaded programs: their kernels, and what is known about the kernels' parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashwarp._jit import spelling

if TYPE_CHECKING:
    from flashwarp._jit.compiler import KernelResources


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel that a device can run, launched by its `handle`.

    `symbol` is its mangled name, which has the types of its parameters; `param_bytes` are their
    sizes. For each that is an array or pointer, `element_bytes` is the size of an element; 0 if not
    known. `resources` are those that it uses on a GPU.
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
        return {spelling.kernel_name(kernel.symbol): kernel for kernel in self.kernels}
