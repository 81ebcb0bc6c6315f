"""Checks of the dtypes and shapes that an array can have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp.config import SIZE_MAX, brief, integer
from flashwarp.errors import ArgumentError, DtypeError

__all__ = ["check_dtype", "check_shape"]


def check_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a dtype whose values consist of their bytes; raises DtypeError for others."""
    if dtype is None:
        raise DtypeError("no dtype is given: name one; numpy's default would be float64")
    try:
        result = np.dtype(dtype)
    except Exception as error:  # numpy parses texts, and raises SyntaxError and others
        raise DtypeError(f"{brief(dtype)} is not a dtype") from error
    if result.hasobject:
        raise DtypeError(
            f"dtype {result} holds Python objects, whose bytes mean nothing in a file: "
            "store numbers, fixed-width text or records"
        )
    if result.subdtype is not None:
        raise DtypeError(
            f"dtype {result} is an array itself: use {result.base} and make its axes "
            f"{result.shape} the last ones of the shape"
        )
    if result.itemsize == 0:
        raise DtypeError(f"dtype {result} has elements of no bytes")
    return result


def check_shape(shape: int | Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return a shape as a tuple of int, or raise ArgumentError.

    Lengths are integers, not floats, bools or texts. An array has at most as many axes as numpy's.
    The lengths that are not 0 make at most 2^63 - 1 bytes.
    """
    lengths: Any = shape if np.iterable(shape) else (shape,)
    if isinstance(lengths, str | bytes | bytearray | Mapping | Set):
        raise ArgumentError(
            f"shape={brief(shape)} is neither an integer nor a sequence of integers"
        )
    try:
        result = tuple(integer("length", n) for n in lengths)
    except ArgumentError as error:
        raise ArgumentError(f"shape={brief(shape)}: {error}") from None
    if any(n < 0 for n in result):
        raise ArgumentError(f"shape={brief(shape)} has a negative length")
    try:
        np.empty((0,) * len(result))
    except ValueError as error:
        raise ArgumentError(f"a shape of {len(result)} axes: {error}") from error
    nbytes = math.prod(n for n in result if n) * itemsize
    if nbytes > SIZE_MAX:
        raise ArgumentError(f"shape={brief(shape)} makes {nbytes} bytes, more than {SIZE_MAX}")
    return result
