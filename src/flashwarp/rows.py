"""How an indexing operation becomes a launch: which rows, which kernel, with what parameters.

Mirrors `kernels/gather.cuh` and `kernels/maintenance.cuh`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp.cache import GeometryStruct
from flashwarp.errors import BoundsError, IndexDtypeError

__all__ = [
    "ArrayStruct",
    "MaintenanceParams",
    "RowParams",
    "RowSelection",
    "element_bytes",
    "host_indices",
    "segments_per_batch",
    "segments_per_row",
    "select",
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
        ("shape", GeometryStruct),
        ("cache", ctypes.c_uint64),
        ("volume", ctypes.c_uint64),
        ("line_begin", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class RowParams(ctypes.Structure):
    """Mirror of `kernels::row_params`."""

    _fields_ = (
        ("shape", GeometryStruct),
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
        ("drop_dirty", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class RowSelection:
    """What ``x[key]`` means: rows of the first axis, then `rest` applied to what they hold.

    `rows` is a range of the first axis or an array of indices; `scalar` tells that the first axis
    disappears.
    """

    rows: range | npt.NDArray[np.int64]
    scalar: bool
    rest: tuple[Any, ...]


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
    array = np.asarray(indices)
    if array.size == 0 and array.dtype == np.float64 and not isinstance(indices, np.ndarray):
        array = array.astype(np.int64)  # an empty list
    if array.dtype == np.bool_:
        if array.shape != (length,):
            raise BoundsError(f"a mask of shape {array.shape} for an axis of length {length}")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise IndexDtypeError(f"indices of dtype {array.dtype}: use integers or a boolean mask")
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


def select(key: Any, shape: tuple[int, ...]) -> RowSelection:
    """Split a key into rows of the first axis and the rest.

    Raises IndexDtypeError and BoundsError as numpy raises IndexError.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    if any(part is None for part in parts):
        raise IndexDtypeError("None (a new axis) is not supported: reshape the result")
    ellipses = [i for i, part in enumerate(parts) if isinstance(part, EllipsisType)]
    if len(ellipses) > 1:
        raise IndexDtypeError("an index can hold only one Ellipsis")
    if ellipses:
        missing = len(shape) - (len(parts) - 1)
        if missing < 0:
            raise BoundsError(f"{len(parts) - 1} indices for an array of {len(shape)} axes")
        parts[ellipses[0] : ellipses[0] + 1] = [slice(None)] * missing
    if len(parts) > len(shape):
        raise BoundsError(f"{len(parts)} indices for an array of {len(shape)} axes")
    if not parts:
        return RowSelection(range(shape[0] if shape else 1), not shape, ())
    first, rest = parts[0], tuple(parts[1:])
    if all(isinstance(part, slice) and part == slice(None) for part in rest):
        rest = ()
    length = shape[0]
    if isinstance(first, slice):
        try:
            return RowSelection(range(*first.indices(length)), False, rest)
        except TypeError as error:
            raise IndexDtypeError(f"slice {first} is not made of integers") from error
    if isinstance(first, int | np.integer) and not isinstance(first, bool):
        row = int(host_indices(int(first), length))
        return RowSelection(range(row, row + 1), True, rest)
    indices = host_indices(first, length)
    return RowSelection(indices, indices.ndim == 0 and not isinstance(first, np.ndarray), rest)
