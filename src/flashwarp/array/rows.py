"""How an indexing operation becomes a launch: which rows, which kernel, with what parameters.

Mirrors `kernels/rows.cuh` and `kernels/maintenance.cuh`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp.cache.cache import GeometryStruct
from flashwarp.errors import BoundsError, IndexDtypeError

__all__ = [
    "ArrayStruct",
    "MaintenanceParams",
    "RowParams",
    "element_bytes",
    "host_indices",
    "segments_per_batch",
    "segments_per_row",
]

# Rows below this many bytes go an element a lane: a warp a row would leave most lanes idle.
_WIDE_ROW_BYTES = 256


# What one warp fetches at a time: 32 lines of 4 KiB. More would leave the other warps idle, and
# make a line wait until the last one of its batch has come.
_BATCH_BYTES = 128 << 10
_BATCH_MAX = 32


class ArrayStruct(ctypes.Structure):
    """Mirror of `fw::array<T>`: what the parameters of a kernel hold for each array."""

    _fields_ = (
        ("geometry", GeometryStruct),
        ("cache", ctypes.c_uint64),
        ("volume", ctypes.c_uint64),
        ("line_begin", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class RowParams(ctypes.Structure):
    """Mirror of `kernels::row_params`."""

    _fields_ = (
        ("geometry", GeometryStruct),
        ("cache", ctypes.c_uint64),
        ("volume", ctypes.c_uint64),
        ("indices", ctypes.c_uint64),
        ("index_count", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("row_count", ctypes.c_uint64),
        ("look_ahead", ctypes.c_uint64),
        ("index_bytes", ctypes.c_uint32),
        ("segments", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class MaintenanceParams(ctypes.Structure):
    """Mirror of `kernels::maintenance_params`."""

    _fields_ = (
        ("cache", ctypes.c_uint64),
        ("volume", ctypes.c_uint64),
        ("line_begin", ctypes.c_uint64),
        ("line_end", ctypes.c_uint64),
        ("lba", ctypes.c_uint64),
        ("lba_count", ctypes.c_uint32),
        ("opcode", ctypes.c_uint32),
        ("prp1", ctypes.c_uint64),
        ("cdw10", ctypes.c_uint32),
        ("drop", ctypes.c_uint32),
    )


def element_bytes(row_bytes: int, *alignments: int) -> int | None:
    """Width of the element kernel for rows of this size, or None where rows are wide."""
    width = math.gcd(16, row_bytes, *alignments)
    return width if row_bytes < _WIDE_ROW_BYTES and row_bytes // width <= 16 else None


def segments_per_row(row_bytes: int, line_bytes: int) -> int:
    """Most lines that one row touches; rows lie back to back from the start of a line."""
    if row_bytes % line_bytes == 0:
        return row_bytes // line_bytes
    if line_bytes % row_bytes == 0:
        return 1
    return (row_bytes - 1) // line_bytes + 2


def segments_per_batch(line_bytes: int) -> int:
    """How many lines a warp fetches at a time."""
    return min(_BATCH_MAX, max(1, _BATCH_BYTES // line_bytes))


def host_indices(indices: Any, length: int) -> npt.NDArray[np.int64]:
    """Check indices of the host and count negative ones from the front.

    Raises
    ------
    IndexDtypeError
        For anything but integers and booleans.
    BoundsError
        For the first index that is out of bounds.
    """
    try:
        array = np.asarray(indices)
    except (ValueError, TypeError) as error:
        raise IndexDtypeError(f"indices of type {type(indices).__name__}: {error}") from error
    if array.size == 0 and array.dtype == np.float64 and not isinstance(indices, np.ndarray):
        array = array.astype(np.int64)  # an empty list
    if array.dtype == np.bool_:
        if array.shape != (length,):
            raise BoundsError(f"a mask of shape {array.shape} for an axis of length {length}")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise IndexDtypeError(
            f"indices of type {type(indices).__name__} and dtype {array.dtype}: use integers or a "
            "boolean mask"
        )
    if array.dtype == np.uint64 and array.size and array.max() >= np.uint64(1 << 63):
        raise BoundsError(f"index {array.max()} is out of bounds for length {length}")
    array = np.ascontiguousarray(array, np.int64).reshape(array.shape)
    if array.size:
        low, high = array.min(), array.max()
        if low < -length or high >= length:
            bad = array.reshape(-1)[np.argmax((array < -length) | (array >= length))]
            raise BoundsError(f"index {bad} is out of bounds for an axis of length {length}")
        if low < 0:
            array = np.where(array < 0, array + length, array)
    return array
