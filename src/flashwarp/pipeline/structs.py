"""The regions of a pipeline as the host's threads have them; mirrors of `native/pipeline`."""

from __future__ import annotations

import ctypes

__all__ = ["RequestStruct", "ResultStruct"]

_u64 = ctypes.c_uint64


class RequestStruct(ctypes.Structure):
    """Mirror of `batch::request`."""

    _fields_ = (
        ("ready", _u64),
        ("buffer", _u64),
        ("rows", _u64),
        ("first", _u64),
        ("kind", ctypes.c_uint32),
        ("_pad", ctypes.c_uint8 * 28),
    )


class ResultStruct(ctypes.Structure):
    """Mirror of `batch::result`."""

    _fields_ = (("done", _u64), ("failed", _u64), ("_pad", ctypes.c_uint8 * 48))
