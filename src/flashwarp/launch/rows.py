"""The rows of an array, and how kernels move them: sizes, and the kernels' parameters.

Mirrors `kernels/segments.cuh` and `kernels/maintenance.cuh`.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import _native
from flashwarp.cache.miss_list import ListUseStruct
from flashwarp.cache.structs import GeometryStruct
from flashwarp.device.layouts import fields_of
from flashwarp.errors import ArgumentError, BoundsError, IndexDtypeError

# Of narrower rows, each lane copies one element. A warp for each row would leave most lanes idle.
_WIDE_ROW_BYTES = 256

BYTES_WORTH_A_THREAD = 128 << 10
"""Waking a thread of the CPU device takes 50 us, as long as copying so many bytes."""

# What one warp fetches at a time: 32 lines of 4 KiB. With more, other warps would be idle, and a
# line would wait until the last line of its bundle has arrived.
_BUNDLE_BYTES = 128 << 10
_BUNDLE_MAX = 32


@dataclass(frozen=True)
class RowFormat:
    """What the dtype and the shape of an array say about its rows, which its first axis counts.

    An array without axes is one row.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[1:]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @cached_property
    def row_count(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1

    def need_axis(self) -> None:
        """Raise BoundsError if there are no rows to choose from."""
        if not self.shape:
            raise BoundsError("an array without axes has no rows: use x[...]")

    def rows_in(self, nbytes: int) -> int:
        """Count the rows that fit into so many bytes: at least one."""
        return max(1, nbytes // max(1, self.row_bytes))

    def shape_of(self, chosen: range | npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Return the shape of chosen rows."""
        if not self.shape:
            return ()
        lead = (len(chosen),) if isinstance(chosen, range) else chosen.shape
        return lead + self.row_shape


class ArrayStruct(ctypes.Structure):
    """Mirror of `fw::array<T>`: the argument of a kernel for one array."""

    _fields_ = fields_of("array", geometry=GeometryStruct)


class RowParams(ctypes.Structure):
    """Mirror of `kernels::row_params`."""

    _fields_ = fields_of("row_params", geometry=GeometryStruct, misses=ListUseStruct)


# The members of `RowParams` behind those of the array.
_ROW_MEMBERS = struct.Struct("=9Q4I2Q2I")
assert RowParams.indices.offset + _ROW_MEMBERS.size == ctypes.sizeof(RowParams)

Counting: TypeAlias = tuple[int, int, int]
"""How indices count rows: where the rows end, the row of index 0, and what makes a negative index a
row; 0: it is out of bounds."""

Which: TypeAlias = tuple[int, int, int, int, int]
"""Rows and where they go: address, number and size of the indices, the address of the caller's
rows, and bytes of a row. Of a range: 0, its bytes, 0, that address, and its first byte."""

Deferred: TypeAlias = tuple[int, int, int, int]
"""Members of `ListUseStruct`."""

NOT_DEFERRED: Deferred = (0, 0, 0, 0)


class RowPacking:
    """Packs the parameters of launches on one array's rows: `RowParams`.

    Parameters
    ----------
    format : RowFormat
    line_bytes : int
    **array : object
        The members that all launches share: geometry, cache and volume.

    Attributes
    ----------
    segments : int
        The most lines that one row touches.
    counting : Counting
        How the array's own indices count its rows.
    """

    def __init__(self, format: RowFormat, line_bytes: int, **array: Any) -> None:  # noqa: A002
        self.segments = segments_per_row(max(1, format.row_bytes), line_bytes)
        self.counting: Counting = (format.row_count, 0, format.row_count)
        self._array = bytes(RowParams(**array))[: -_ROW_MEMBERS.size]

    def pack(
        self,
        which: Which,
        bundle: int,
        *,
        counting: Counting | None = None,
        look_ahead: int = 0,
        strays: int = 0,
        deferred: Deferred = NOT_DEFERRED,
    ) -> bytes:
        """Return the bytes of `RowParams`."""
        indices, count, index_bytes, buffer, row_bytes = which
        return self._array + _ROW_MEMBERS.pack(
            *(indices, count, buffer, row_bytes, *(counting or self.counting)),
            *(look_ahead, strays, index_bytes or 8, self.segments, bundle, 0, *deferred),
        )


class MaintenanceParams(ctypes.Structure):
    """Mirror of `kernels::maintenance_params`."""

    _fields_ = fields_of("maintenance_params")


def element_bytes(row_bytes: int, *alignments: int) -> int | None:
    """Return the width of the element kernel for rows of this size; None if rows are wide."""
    if row_bytes >= _WIDE_ROW_BYTES:
        return None
    width = math.gcd(16, row_bytes, *alignments)
    return width if row_bytes // width <= 16 else None


def segments_per_row(row_bytes: int, line_bytes: int) -> int:
    """Count the lines that one row touches at most; the first row begins with a line."""
    if row_bytes % line_bytes == 0:
        return row_bytes // line_bytes
    if line_bytes % row_bytes == 0:
        return 1
    return (row_bytes - 1) // line_bytes + 2


def segments_per_bundle(line_bytes: int) -> int:
    """Count the lines that a warp fetches at a time."""
    return min(_BUNDLE_MAX, max(1, _BUNDLE_BYTES // line_bytes))


def plain_slice(part: slice) -> slice:
    """Return a slice of Python's integers; raises IndexDtypeError and ArgumentError."""
    try:
        start, stop, step = (
            None if n is None else operator.index(n) for n in (part.start, part.stop, part.step)
        )
    except Exception as error:
        raise IndexDtypeError(f"a slice is not made of integers: {error}") from error
    if step == 0:
        raise ArgumentError("the step of a slice is 0: it must be another integer")
    return slice(start, stop, step)


def host_indices(indices: object, length: int) -> npt.NDArray[np.int64]:
    """Check indices that lie on the host, and make negative ones count from the front.

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
    negative, stray = _native.index_bounds(array, length)
    if stray is not None:
        raise BoundsError(f"index {stray} is out of bounds for an axis of length {length}")
    return np.where(array < 0, array + length, array) if negative else array
