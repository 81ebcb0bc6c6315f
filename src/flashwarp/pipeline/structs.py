"""The structs of batches as device code has them; mirrors of `batch/*.cuh` and `batch.cuh`.

A test compares their layouts with the headers.
"""

from __future__ import annotations

import ctypes

from flashwarp.cache.structs import FailureLogStruct
from flashwarp.nvme.queue_pair import TransportStruct, u32, u64

__all__ = [
    "DirectionStruct",
    "PipelineStruct",
    "RegionsStruct",
    "RequestStruct",
    "ResultStruct",
    "SlotStateStruct",
]


class RequestStruct(ctypes.Structure):
    """Mirror of `batch::request`."""

    _fields_ = (
        *u64("ready", "buffer", "rows", "first"),
        *u32("kind", "place"),
        *u64("after"),
        ("_pad", ctypes.c_uint8 * 16),
    )


class ResultStruct(ctypes.Structure):
    """Mirror of `batch::result`."""

    _fields_ = (*u64("done", "failed"), ("_pad", ctypes.c_uint8 * 48))


class RegionsStruct(ctypes.Structure):
    """Mirror of `batch::regions`."""

    _fields_ = (
        *u64("requests", "results", "lists", "all_statuses"),
        *u32("count", "reserved"),
        *u64("rows_max"),
    )


class SlotStateStruct(ctypes.Structure):
    """Mirror of `batch::slot_state`."""

    _fields_ = (*u64("issued", "rows"), *u32("held", "next"), *u64("reserved"))


class DirectionStruct(ctypes.Structure):
    """Mirror of `batch::direction`."""

    _fields_ = (
        ("shared", RegionsStruct),
        *u64("states", "failures"),
        ("limit", TransportStruct),
        *u64("row_bytes", "other"),
        *u64("taken", "meeting", "found"),
        ("log", FailureLogStruct),
        *u64("late", "full"),
        *u32("looked"),
        ("_pad", ctypes.c_uint8 * 68),
    )


class PipelineStruct(ctypes.Structure):
    """Mirror of `fw::pipeline`, a kernel's parameter."""

    _fields_ = u64("reads", "writes")
