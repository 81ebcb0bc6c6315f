"""A region: a named array of a version, as every tier and the files describe it.

A region says what the bytes are and never holds them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwarp.config import SIZE_MAX, integer
from flashwarp.dtypes import check_shape
from flashwarp.errors import ArgumentError, DtypeError

REGION_NAME_BYTES_MAX = 1024
"""Most bytes of a region's name in UTF-8; the keys of state dicts are far shorter."""

_RECORD_CHARS_MAX = 1 << 16
_DTYPE = re.compile(r"[<>|=]?[A-Za-z_][A-Za-z0-9_]{0,62}(\[[0-9]{0,9}[A-Za-z]{1,8}\])?")


@dataclass(frozen=True)
class Region:
    """A named array of a version.

    Parameters
    ----------
    name : str
        Unique in its version; 1 to 1024 bytes of UTF-8.
    dtype : str or numpy.dtype
        Element type, kept as text: numpy's with its byte order, such as ``"<f4"``; a name that
        numpy does not have, such as ``"bfloat16"``; or the fields of a record as JSON, such as
        ``'[["x", "<f4"], ["y", "<i8", [3]]]'``, as `numpy.lib.format.dtype_to_descr` lists them.
    shape : tuple of int
        Length of each axis.
    nbytes : int
        Size in bytes. If numpy knows the dtype, it must be that of the shape.

    Raises
    ------
    ArgumentError, DtypeError
        If they do not describe an array.

    Examples
    --------
    >>> from flashwarp.checkpoint.region import Region
    >>> Region("weights", "<f4", (2, 3), 24)
    Region(name='weights', dtype='<f4', shape=(2, 3), nbytes=24)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        _check_name(self.name)
        put = object.__setattr__
        put(self, "dtype", _dtype_text(self.dtype))
        known = numpy_dtype(self.dtype)
        put(self, "shape", check_shape(self.shape, 1 if known is None else known.itemsize))
        put(self, "nbytes", integer(f"nbytes of region {self.name!r}", self.nbytes, 0, SIZE_MAX))
        if known is not None and math.prod(self.shape) * known.itemsize != self.nbytes:
            raise ArgumentError(
                f"region {self.name!r} of dtype {self.dtype} and shape {self.shape} has "
                f"{math.prod(self.shape) * known.itemsize} bytes, not {self.nbytes}"
            )


def numpy_dtype(text: str) -> np.dtype[Any] | None:
    """Return the dtype that numpy has for a region's, or None."""
    try:
        found = np.dtype(text) if text[:1] != "[" else _record(json.loads(text))
    except Exception:  # numpy parses texts, and raises ValueError and others
        return None
    return None if found.hasobject else found


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the text for a dtype of numpy; raises DtypeError if it cannot be made from it."""
    if dtype.hasobject:
        raise DtypeError("Python objects cannot be stored: their bytes mean nothing in a file")
    if dtype.subdtype is not None:
        raise DtypeError(f"dtype {dtype} is an array by itself: store an array of its elements")
    if dtype.names is None:
        return dtype.str
    try:
        text = json.dumps(dtype.descr)
    except (TypeError, ValueError):  # fields that overlap, or are not in their order
        text = ""
    if numpy_dtype(text) != dtype or len(text) > _RECORD_CHARS_MAX:
        raise DtypeError(
            f"dtype {repr(dtype)[:200]} is no list of up to {_RECORD_CHARS_MAX} characters of "
            "fields that follow each other: store the array's bytes, x.view('u1')"
        )
    return text


def _record(fields: Any) -> np.dtype[Any]:
    """Return the dtype of a record; JSON has lists in place of tuples."""

    def tuples(listed: Any) -> Any:
        return [
            (
                tuple(name) if isinstance(name, list) else name,
                tuples(kind) if isinstance(kind, list) else kind,
                *map(tuple, shape),
            )
            for name, kind, *shape in listed
        ]

    return np.lib.format.descr_to_dtype(tuples(fields))


def _check_name(name: object) -> None:
    try:
        good = isinstance(name, str) and 1 <= len(name.encode()) <= REGION_NAME_BYTES_MAX
    except UnicodeEncodeError:
        good = False
    if not good:
        shown = repr(name)[:100]
        raise ArgumentError(
            f"the name {shown} of a region is not a text of 1 to {REGION_NAME_BYTES_MAX} bytes "
            "in UTF-8"
        )


def _dtype_text(dtype: object) -> str:
    if isinstance(dtype, type | np.dtype):
        dtype = dtype_text(np.dtype(dtype))
    if isinstance(dtype, str) and dtype[:1] == "[":
        known = numpy_dtype(dtype) if len(dtype) <= _RECORD_CHARS_MAX else None
        if known is not None and known.names is not None:
            return dtype
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        shown = repr(dtype)[:100]
        raise DtypeError(
            f"dtype {shown} is no name of an element type, such as '<f4' or 'bfloat16'"
        )
    known = numpy_dtype(dtype)
    if known is None and dtype.lstrip("<>|=") in ("O", "object", "object_"):
        raise DtypeError("Python objects cannot be stored: their bytes mean nothing in a file")
    return dtype
