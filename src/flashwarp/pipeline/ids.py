"""The ids of a batch, whether they are on a GPU, and which rows they name; the rows to write."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashwarp.array.array import Array
from flashwarp.errors import ArgumentError, DtypeError
from flashwarp.launch.operands import Index, is_foreign, rows_of
from flashwarp.launch.rows import host_indices

# DLPack's kinds of memory: of a GPU, and managed.
_CUDA_KINDS = (2, 13)


def on_gpu(ids: object) -> bool:
    """Return whether ids are an array in a GPU's memory."""
    if not is_foreign(ids):
        return False
    if hasattr(ids, "__cuda_array_interface__"):
        return True
    given: Any = ids
    return int(given.__dlpack_device__()[0]) in _CUDA_KINDS


def host_rows(array: Array, ids: object) -> tuple[range | Index, str]:
    """Check ids that the host knows: a range of rows, or a list of them that stays on the host."""
    length = len(array)
    if isinstance(ids, slice | range):
        ids = rows_of(ids, length)
    if isinstance(ids, range):
        return ids, ""
    library = "numpy"
    if is_foreign(ids):
        library = array.device.view(ids).library
        given: Any = ids
        ids = np.from_dlpack(given)
    host = np.asarray(host_indices(ids, length), order="C")
    return Index(host.ctypes.data, host.shape, 8, library, host), library


def refuse_repeats(array: Array, ids: object) -> None:
    """Raise ArgumentError if ids that the host knows name a row twice."""
    if on_gpu(ids):
        return
    rows, _ = host_rows(array, ids)
    if isinstance(rows, range):
        return
    found, counts = np.unique(np.asarray(rows.owner), return_counts=True)
    if len(found) != len(rows):
        twice = int(found[counts > 1][0])
        raise ArgumentError(
            f"row {twice} occurs more than once in a batch of writes, which has no order: leave "
            "one of its values"
        )


def check_rows(array: Array, count: int, rows: object) -> None:
    """Raise ArgumentError or DtypeError unless rows fit a batch of writes as they are.

    Rows in a GPU's memory are checked where their address is taken.
    """
    shape = (count, *array.shape[1:])
    given: Any = getattr(rows, "shape", None)
    if given is None or tuple(given) != shape:
        what = type(rows).__name__ if given is None else f"shape {tuple(given)}"
        raise ArgumentError(
            f"the rows to write have {what}, and {count} ids need an array of shape {shape}"
        )
    if isinstance(rows, np.ndarray):
        dtype, contiguous = rows.dtype, rows.flags.c_contiguous
    elif array.device.kind == "cpu" and is_foreign(rows):
        view = array.device.view(rows)
        dtype, contiguous = view.dtype, view.contiguous
    else:
        return
    if dtype != array.dtype:
        raise DtypeError(
            f"the rows to write have dtype {dtype}, and the array {array.dtype}: convert them"
        )
    if not contiguous:
        raise ArgumentError("the rows to write are not contiguous: write a contiguous copy")
