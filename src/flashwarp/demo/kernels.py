"""How the demo's own kernels get at arrays: the struct that device code holds, and launches.

The one file of the demo that knows more of `Array` than its users do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import flashwarp as fw

__all__ = ["ArrayView", "data_path_of", "launch", "view_of"]


class ArrayView(ctypes.Structure):
    """Mirror of fw::array<T>: what a kernel's parameter struct has for each array."""

    _fields_ = (
        ("cache", ctypes.c_uint64),
        ("volume", ctypes.c_uint64),
        ("line_begin", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


def view_of(array: fw.Array) -> ArrayView:
    """Return the struct by which kernels reach `array` while it is open."""
    return ArrayView(*array.kernel_handle)


def launch(name: str, params: ctypes.Structure, arrays: Sequence[fw.Array], warps: int) -> None:
    """Run `fw_<name>`, which reads `arrays` of one device, and wait.

    Raises StorageError when a transfer failed: what the kernel computed is void then.
    """
    device = arrays[0].device
    for array in arrays:
        array.controller.wake()
    # CPU threads that wait for a line do the controllers' work meanwhile.
    serve = [array.controller.address for array in arrays] if device.kind == "cpu" else ()
    device.launch(name, params, warps=warps, serve=serve)
    for array in arrays:
        # Waits for the launch, and raises what this array met.
        array._finish(name, None)


def data_path_of(array: fw.Array) -> str:
    """Tell in one line how the bytes of `array` travel."""
    told = array.explain()
    engine = told.controller.get("engine", "none")
    return f"data path {told.path}: {told.reason}; engine: {engine}"
