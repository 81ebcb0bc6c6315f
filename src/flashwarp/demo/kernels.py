"""Launches of the demo's own kernels, and one line on how an array's bytes travel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import flashwarp as fw

__all__ = ["data_path_of", "launch"]


def launch(name: str, params: ctypes.Structure, arrays: Sequence[fw.Array], warps: int) -> None:
    """Run `fw_<name>`, which reads `arrays` of one device, and wait.

    Raises StorageError when a transfer failed: what the kernel computed is void then.
    """
    device = arrays[0].device
    for array in arrays:
        array.controller.wake()
    # CPU threads that wait for a line do the controllers' work meanwhile.
    uses = [native for array in arrays for native in array.controller.natives]
    device.launch(name, params, warps=warps, uses=uses, policy=arrays[0].cache.policy)
    for array in arrays:
        array.synchronize()


def data_path_of(array: fw.Array) -> str:
    """Tell in one line how the bytes of `array` travel."""
    told = array.explain()
    engine = told.controller.get("engine", "none")
    return f"data path {told.path}: {told.reason}; engine: {engine}"
