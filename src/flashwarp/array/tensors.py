"""The calls of an array on rows that run in the extension; see `native/bind/row_calls.h`.

The ordinary way describes operands of any library, which takes longer than a small gather.
"""

from __future__ import annotations

from flashwarp import _native
from flashwarp.array.launcher import Launcher
from flashwarp.device import CudaDevice

__all__ = ["row_calls"]


def row_calls(launcher: Launcher, streams: set[int]) -> _native.RowCalls:
    """Make the calls of an array that need no Python.

    `streams` has the streams on which the array may have work; those of calls are added.
    """
    device, rows = launcher.volume.cache.device, launcher.format
    return _native.RowCalls(
        device.launching if isinstance(device, CudaDevice) else None,
        row_shape=list(rows.row_shape),
        row_bytes=rows.row_bytes if rows.shape else 0,  # none goes the short way
        length=rows.row_count,
        dtype=rows.dtype,
        dtype_name=rows.dtype.name if rows.dtype.isnative else None,
        launcher=launcher,
        streams=streams,
    )
