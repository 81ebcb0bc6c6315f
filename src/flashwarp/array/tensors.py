"""The short way of calls whose operands are tensors of torch on the array's GPU.

The ordinary way describes operands of any library, which takes longer than a small gather. This one
is code of the extension, `native/bind/tensor_calls.cpp`, which looks at the tensors and at the
state of the array, and launches. Whatever is unusual goes the ordinary way, which also raises the
errors.
"""

from __future__ import annotations

from flashwarp import _native
from flashwarp.array.launcher import Launcher
from flashwarp.device import CudaDevice

__all__ = ["tensor_calls"]


def tensor_calls(launcher: Launcher, streams: set[int]) -> _native.TensorCalls | None:
    """Return the short way of an array; None on the CPU device.

    `streams` has the streams on which the array may have work; those of calls are added.
    """
    device, rows = launcher.volume.cache.device, launcher.format
    if not isinstance(device, CudaDevice):
        return None
    return _native.TensorCalls(
        device.launching,
        row_shape=list(rows.row_shape),
        row_bytes=rows.row_bytes if rows.shape else 0,  # none goes the short way
        dtype_name=rows.dtype.name if rows.dtype.isnative else None,
        launcher=launcher,
        streams=streams,
        own_members_at=launcher.own_members_at,
    )
