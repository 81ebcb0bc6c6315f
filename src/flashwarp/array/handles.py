"""Texts that stand for arrays: operators of torch take tensors, numbers and text, but no arrays.

A handle also has the array's shape and dtype, because compilers that keep compiled code find it by
the operator's arguments. Handles keep no array alive.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from flashwarp.errors import ClosedError

_numbers = itertools.count(1)
_arrays: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def new(array: Any) -> str:
    """Make a handle for an array that has shape and dtype; no other array ever gets this one."""
    handle = f"array {next(_numbers)}: {array.dtype.str} {array.shape}"
    point_to(handle, array)
    return handle


def point_to(handle: str, array: Any) -> None:
    """Let a handle stand for this array from now on."""
    _arrays[handle] = array


def array_of(handle: str) -> Any:
    """Return the array; raises ClosedError if it is gone."""
    try:
        return _arrays[handle]
    except KeyError:
        raise ClosedError(f"{handle!r} does not exist any more, or is of another process") from None


def arrays() -> list[Any]:
    """Return all arrays that exist and were opened, each once."""
    return list({id(array): array for array in _arrays.values()}.values())
