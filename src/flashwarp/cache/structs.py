"""The structs of the cache as device code has them; mirrors of `cache/*.cuh`.

A test compares their layouts with the headers.
"""

from __future__ import annotations

import ctypes

import numpy as np

from flashwarp.device.layouts import fields_of

FAILURES_KEPT = 8
"""`kFailuresKept`: unread entries that a sequence of failures holds."""


class GeometryStruct(ctypes.Structure):
    """Mirror of `cache::geometry`."""

    _fields_ = fields_of("geometry")


class HostTierStruct(ctypes.Structure):
    """Mirror of `cache::host_tier`."""

    _fields_ = fields_of("host_tier")


class LineCacheStruct(ctypes.Structure):
    """Mirror of `cache::line_cache`."""

    _fields_ = fields_of("line_cache", geometry=GeometryStruct, tier=HostTierStruct)


class QueueSpanStruct(ctypes.Structure):
    """Mirror of `cache::queue_span`."""

    _fields_ = fields_of("queue_span")


class FailureStruct(ctypes.Structure):
    """Mirror of `cache::failure`."""

    _fields_ = fields_of("failure")


class ErrorRecordStruct(ctypes.Structure):
    """Mirror of `cache::error_record`."""

    _fields_ = fields_of("error_record", commands=FailureStruct, indices=FailureStruct)


class FailureLogStruct(ctypes.Structure):
    """Mirror of `cache::failure_log`."""

    _fields_ = fields_of("failure_log")


class VolumeStruct(ctypes.Structure):
    """Mirror of `cache::volume`."""

    _fields_ = fields_of(
        "volume", spans=QueueSpanStruct, commands=FailureLogStruct, indices=FailureLogStruct
    )


class CountersStruct(ctypes.Structure):
    """Mirror of `cache::counters`: words of 64 bits, then padding."""

    _fields_ = fields_of("counters")

    @classmethod
    def sums(cls, shards: bytes) -> dict[str, int]:
        """Add up an array of these structs, by field."""
        # A launch that fetches for the next one takes away the hits that this will count.
        words = np.frombuffer(shards, np.int64).reshape(-1, ctypes.sizeof(cls) // 8).sum(0).clip(0)
        names = (name for name, _ in cls._fields_ if not name.startswith("_"))
        return dict(zip(names, words.tolist(), strict=False))
