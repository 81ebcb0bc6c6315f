"""Keys of arrays: the rows that ``x[key]`` touches, and what numpy selects from them.

numpy itself decides what a key means. A key is checked by applying it to an array of the same
shape with elements of no bytes. Then the rows that it touches are read, and the key is applied to
these rows, with its part for the first axis replaced. Keys that numpy refuses are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp.errors import BoundsError, IndexDtypeError
from flashwarp.launch.rows import host_indices, plain_slice

Part: TypeAlias = int | slice | EllipsisType | npt.NDArray[Any] | None
"""A part of a key, for one axis, for several, or for a new one."""

Key: TypeAlias = tuple[Part, ...]

_ALL = slice(None)
_NO_BYTES = np.dtype("V0")


@dataclass(frozen=True)
class Block:
    """Rows that are read or stored together.

    `key` is what numpy selects from them, and `place` where that lies in the selection.
    """

    rows: range | npt.NDArray[np.int64]
    key: Key
    place: Key


@dataclass(frozen=True)
class Selection:
    """The selection of ``x[key]``.

    Attributes
    ----------
    shape : tuple of int
        Of the selection.
    scalar : bool
        Whether numpy returns a scalar and not an array.
    whole : bool
        Whether all elements of the touched rows are selected, in the order of `rows`: then
        `whole_key` applied to the rows is the selection.
    rows : range or array of int64
        Rows of the first axis. An array may repeat rows and have any number of axes.
    is_mask : bool
        Whether the key is one boolean mask with the axes of the array.
    """

    shape: tuple[int, ...]
    scalar: bool
    whole: bool
    rows: range | npt.NDArray[np.int64]
    key: Key
    """For a range: the key for its rows. Else: the whole key, without the index arrays."""
    axis: int | None
    """Axis of the selection along which rows lie or index arrays begin; None for a single row."""
    arrays: tuple[tuple[int, npt.NDArray[np.int64]], ...] = ()
    """Index arrays, broadcast, by their place in the key; the first one is for the first axis."""
    is_mask: bool = False

    @property
    def in_order(self) -> bool:
        """Whether the selection has the shape of its rows and is stored in their order."""
        return self.whole and isinstance(self.rows, range) and self.key == (_ALL,)

    @property
    def whole_key(self) -> Key:
        """The key for whole rows that were read in the order of `rows`."""
        if not self.arrays:
            return self.key
        at, rows = self.arrays[0]
        return (*self.key[:at], *(_ALL,) * rows.ndim, *self.key[at + 1 :])

    def blocks(self, rows_max: int) -> Iterator[Block]:
        """Split the selection into blocks of at most `rows_max` rows; no row is in two blocks.

        Elements that are selected several times keep their order.
        """
        if isinstance(self.rows, range):
            for start in range(0, len(self.rows), rows_max):
                part = slice(start, start + rows_max)
                yield Block(self.rows[part], self.key, self._place(part))
            return
        touched, inverse, counts = np.unique(self.rows, return_inverse=True, return_counts=True)
        if len(touched) <= rows_max:
            yield Block(touched, self._key_at(..., inverse.reshape(self.rows.shape)), ())
            return
        inverse = inverse.reshape(-1)
        order, ends = np.argsort(inverse, kind="stable"), np.cumsum(counts)
        for start in range(0, len(touched), rows_max):
            stop = min(start + rows_max, len(touched))
            chosen = order[ends[start] - counts[start] : ends[stop - 1]]
            where = np.unravel_index(chosen, self.rows.shape)
            key = self._key_at(where, inverse[chosen] - start)
            yield Block(touched[start:stop], key, self._place(*where))

    def _place(self, *parts: Part) -> Key:
        return () if self.axis is None else (*(_ALL,) * self.axis, *parts)

    def _key_at(self, where: Any, first: Any = None) -> Key:
        """Return the key of these elements of the index arrays; `first` replaces the first's."""
        key = list(self.key)
        for place, array in self.arrays:
            key[place] = array[where]
        if first is not None:
            key[self.arrays[0][0]] = first
        return tuple(key)


def select(key: object, shape: tuple[int, ...]) -> Selection:
    """Return what ``x[key]`` selects from an array of this shape.

    Raises
    ------
    IndexDtypeError
        For parts of a key that are no indices.
    BoundsError
        For keys of a wrong form or out of bounds, for which numpy raises IndexError.
    ArgumentError
        For a slice with step zero.
    """
    parts = tuple(map(_plain, key)) if isinstance(key, tuple) else (_plain(key),)
    parts, at = _first_part(parts, len(shape))
    if not shape:
        found = _apply(parts, shape)
        return Selection(found.shape, found.scalar, True, range(1), parts, None)
    first = parts[at]
    whole = all(map(_keeps_all, parts[:at] + parts[at + 1 :]))
    if not isinstance(first, np.ndarray):
        return _in_range(parts, at, shape, whole)
    if whole and _axes(first) == 1:
        return _whole_rows(parts, at, first, shape)
    return _elements(parts, at, shape)


def _in_range(parts: Key, at: int, shape: tuple[int, ...], whole: bool) -> Selection:
    """Select from one row, or from those of a slice or an Ellipsis."""
    first, length, row = parts[at], shape[0], shape[1:]
    if isinstance(first, int):
        if not -length <= first < length:
            raise BoundsError(f"index {first} is out of bounds for an axis of length {length}")
        number = first % length
        key = (*parts[:at], 0, *parts[at + 1 :])
        found = _apply(key, (1, *row))
        return Selection(found.shape, found.scalar, whole, range(number, number + 1), key, None)
    rows = range(*first.indices(length)) if isinstance(first, slice) else range(length)
    key = (*parts[:at], _ALL if isinstance(first, slice) else first, *parts[at + 1 :])
    found = _apply(key, (1, *row))
    if whole:
        axis = sum(part is None for part in parts[:at])
    else:
        axis = _growing_axis(found, _apply(key, (2, *row)))
    selected = (*found.shape[:axis], len(rows), *found.shape[axis + 1 :])
    return Selection(selected, False, whole, rows, key, axis)


def _whole_rows(parts: Key, at: int, first: npt.NDArray[Any], shape: tuple[int, ...]) -> Selection:
    """Select rows by one index array or mask on the first axis."""
    rows = host_indices(first, shape[0])
    axis = sum(part is None for part in parts[:at])
    is_mask = len(parts) == len(shape) == 1 and first.dtype == np.bool_
    made = Selection((), False, True, rows, parts, axis, ((at, rows),), is_mask)
    found = _apply(made.whole_key, (*rows.shape, *shape[1:]))
    return replace(made, shape=found.shape)


def _elements(parts: Key, at: int, shape: tuple[int, ...]) -> Selection:
    """Select by several parts. The first index array is for the first axis."""
    found = _apply(parts, shape)
    is_mask = len(parts) == 1 and _axes(parts[at]) == len(shape)
    key: list[Part] = []
    places: list[int] = []
    index_arrays: list[npt.NDArray[Any]] = []
    for part in parts:
        if not isinstance(part, np.ndarray):
            key.append(part)
            continue
        # As numpy does: a mask stands for as many index arrays as it has axes.
        arrays = np.nonzero(part) if part.dtype == np.bool_ else (part,)
        places += range(len(key), len(key) + len(arrays))
        key += arrays
        index_arrays += arrays
    together = np.broadcast_arrays(*index_arrays)
    rows = np.where(together[0] < 0, together[0] + shape[0], together[0])
    made = Selection(
        found.shape,
        False,
        False,
        rows,
        tuple(key),
        0,
        tuple(zip(places, (rows, *together[1:]), strict=True)),
        is_mask,
    )
    if not rows.size:
        return made
    counts = (np.zeros(n, np.intp) for n in (1, 2))
    once, twice = (_apply(made._key_at(np.unravel_index(n, rows.shape)), shape) for n in counts)
    return replace(made, axis=_growing_axis(once, twice))


# Parts of keys.


def _plain(part: object) -> Part:
    """Return a part as None, Ellipsis, an int, a slice of ints, or an array of intp or bool.

    Reads the value of each object once, so that it cannot change afterwards.
    """
    if part is None or part is ...:
        return part
    if isinstance(part, slice):
        return plain_slice(part)
    if not isinstance(part, np.ndarray | list | bool | np.bool_):
        try:
            return operator.index(part)  # type: ignore[arg-type]
        except Exception:  # not an integer, whichever error it raises; numpy does the same
            pass
    array = _plain_array(part)
    if array.dtype == np.bool_ and array.ndim == 0:
        raise IndexDtypeError(
            "a single True or False is no index: write x[None] for a new axis, or a mask with the "
            "shape of the axes it is for"
        )
    if array.dtype == np.bool_:
        return array
    if array.dtype == np.uint64 and array.size and array.max() >= np.uint64(1 << 63):
        raise BoundsError(f"index {array.max()} is out of bounds: it exceeds 2^63 - 1")
    return int(array) if array.ndim == 0 else array.astype(np.intp)


def _plain_array(part: object) -> npt.NDArray[Any]:
    try:
        array = np.asarray(part)
    except Exception as error:
        raise IndexDtypeError(f"an index of type {type(part).__name__}: {error}") from error
    if array.size == 0 and not isinstance(part, np.ndarray):
        return array.astype(np.intp)  # an empty list; numpy makes floats of it
    if array.dtype.kind in "SU":
        raise IndexDtypeError(
            "a text is no index; for fields read the rows first: x[rows]['field'], or "
            "x[...]['field'] for all rows; to store, change these rows, and assign x[rows] = them"
        )
    if array.dtype.kind not in "biu":
        raise IndexDtypeError(
            f"an index of type {type(part).__name__} and dtype {array.dtype}: use integers, "
            "slices, Ellipsis, None, or arrays of integers or booleans"
        )
    return array


def _axes(part: Part) -> int:
    """Count the axes that a part takes; 0 for Ellipsis, which takes the rest."""
    if part is None or part is ...:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == np.bool_ else 1


def _keeps_all(part: Part) -> bool:
    """Return whether a part leaves its axes as they are."""
    return part is None or part is ... or (isinstance(part, slice) and part == _ALL)


def _first_part(parts: Key, ndim: int) -> tuple[Key, int]:
    """Return the parts, and which is for the first axis; adds one if the key has none."""
    if sum(part is ... for part in parts) > 1:
        raise IndexDtypeError("a key can hold only one Ellipsis")
    taken = sum(map(_axes, parts))
    if taken > ndim:
        raise BoundsError(f"{taken} indices for an array of {ndim} axes")
    for at, part in enumerate(parts):
        if _axes(part) or (part is ... and taken < ndim):
            return parts, at
    return ((*parts, _ALL) if ndim else parts), len(parts)


# What numpy makes of a key.


class _Found(NamedTuple):
    shape: tuple[int, ...]
    scalar: bool


def _apply(key: Key, shape: tuple[int, ...]) -> _Found:
    """Apply a key to an array of this shape, which takes no memory."""
    used: Key = key
    rest: tuple[int, ...] = ()
    if key and key[-1] is ...:
        used = key[:-1]
    if not any(part is ... for part in used):
        # Leave out axes that the key keeps whole: index arrays cost time for each element.
        while used and isinstance(used[-1], slice) and used[-1] == _ALL:
            used = used[:-1]
        taken = sum(map(_axes, used))
        shape, rest = shape[:taken], shape[taken:]
    try:
        found = np.empty(shape, _NO_BYTES)[used]
        if found.ndim + len(rest) > 32:
            np.empty((*found.shape, *rest), _NO_BYTES)  # raises beyond numpy's limit of axes
    except (IndexError, ValueError) as error:
        raise BoundsError(str(error)) from error
    return _Found(found.shape + rest, len(used) == len(key) and isinstance(found, np.void))


def _growing_axis(one: _Found, two: _Found) -> int:
    """Return the axis of the rows: the one that grows with the number of rows."""
    return next(i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b)
