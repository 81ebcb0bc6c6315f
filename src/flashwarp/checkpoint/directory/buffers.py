"""Buffers of callers as bytes, and memory that begins on a page, as O_DIRECT needs it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp.errors import ArgumentError

PAGE_BYTES = 4096


def bytes_of(buffer: Any, writable: bool) -> memoryview:
    """Return the bytes of a contiguous buffer; raises ArgumentError for anything else."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError) as error:  # no buffer, or one of a dtype without a format
        raise ArgumentError(
            f"a buffer of type {type(buffer).__name__}: {error}; an array of any dtype has its "
            "bytes as x.view('u1')"
        ) from error
    if not view.c_contiguous:
        raise ArgumentError("the buffer is not contiguous: copy it first")
    if writable and view.readonly:
        raise ArgumentError("the buffer is read-only")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory that begins on a page; its contents are undefined."""
    raw = np.empty(nbytes + PAGE_BYTES, np.uint8)
    begin = -raw.ctypes.data % PAGE_BYTES
    return raw[begin : begin + nbytes]
