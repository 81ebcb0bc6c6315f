"""Keys: reading and storing what ``x[key]`` selects, in blocks of whole rows.

`selection` says what numpy selects. Blocks of neighbours are moved as ranges, others by index.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from flashwarp import config
from flashwarp.array import moving
from flashwarp.array.selection import Selection
from flashwarp.errors import ArgumentError
from flashwarp.launch.operands import host_empty, host_index
from flashwarp.launch.rows import RowFormat


class Indexed(moving.Attached, Protocol):
    """An array, of which the caller has the turn, with its calls on rows by index."""

    def gather(self, idx: object) -> Any:
        """Return rows; see `Array.gather`."""

    def scatter(self, idx: object, values: object) -> None:
        """Store rows; see `Array.scatter`."""


def rows_at_once(rows: RowFormat) -> int:
    """Return how many rows a block has."""
    return rows.rows_in(config.current("key_bytes").key_bytes)


def read(array: Indexed, chosen: Selection) -> Any:
    """Return a copy of what a key selects."""
    if chosen.whole:
        return _read_rows(array, chosen.rows)[chosen.whole_key]
    rows = array._attachment.launcher.format
    result = host_empty(chosen.shape, rows.dtype)
    if result.size:
        for block in chosen.blocks(rows_at_once(rows)):
            result[block.place] = _read_rows(array, block.rows)[block.key]
    return result[()] if chosen.scalar else result


def store(array: Indexed, chosen: Selection, value: object) -> None:
    """Store a value to what a key selects, as numpy assigns it."""
    array._attachment.need_writable()
    values, rows = array._attachment.operands, array._attachment.launcher.format
    if chosen.is_mask and (ndim := values.as_array(value).ndim) > 1:
        raise ArgumentError(
            f"values with {ndim} axes for a mask of the whole array: give one value, or one "
            "axis of values"
        )
    if 0 in chosen.shape:
        values.assign(np.empty(chosen.shape, rows.dtype), ..., value)
        return
    blocks = list(chosen.blocks(rows_at_once(rows)))
    given = None if len(blocks) == 1 else values.broadcast(value, chosen.shape)
    for block in blocks:
        part = value if given is None else given[block.place]
        shape = rows.shape_of(block.rows)
        if chosen.in_order and isinstance(part, np.ndarray) and values.as_stored(part, shape):
            _store_rows(array, block.rows, part)
            continue
        held = host_empty(shape, rows.dtype) if chosen.whole else _read_rows(array, block.rows)
        values.assign(held, block.key, part)
        _store_rows(array, block.rows, held)


def _are_neighbours(chosen: range | npt.NDArray[np.int64]) -> TypeGuard[range]:
    return isinstance(chosen, range) and (chosen.step == 1 or len(chosen) < 2)


def _read_rows(array: Indexed, chosen: range | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    if _are_neighbours(chosen):
        target = array._attachment.operands.target(None, chosen)
        moving.move(array, "gather", chosen, target)
        rows: npt.NDArray[Any] = target.finish(None)
        return rows
    return np.asarray(array.gather(host_index(chosen) if isinstance(chosen, range) else chosen))


def _store_rows(
    array: Indexed, chosen: range | npt.NDArray[np.int64], block: npt.NDArray[Any]
) -> None:
    """Store a dense block to rows, none of which repeats."""
    if _are_neighbours(chosen):
        source = array._attachment.operands.placed(block)
        moving.move(array, "scatter", chosen, source)
        source.release()
    else:
        array.scatter(host_index(chosen) if isinstance(chosen, range) else chosen, block)
