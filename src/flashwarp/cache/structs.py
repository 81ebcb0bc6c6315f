"""The structs of the cache as device code has them; mirrors of `cache/*.cuh`.

A test compares their layouts with the headers.
"""

from __future__ import annotations

import ctypes

from flashwarp.nvme.group import NAMESPACES_MAX
from flashwarp.nvme.queue_pair import u32, u64

FAILURES_KEPT = 8
"""`kFailuresKept`: unread entries that a sequence of failures holds."""

EPOCH_BYTES = 8
"""Of the epoch of an entry of the volume table; see `kernels/resident.cuh`."""


class GeometryStruct(ctypes.Structure):
    """Mirror of `cache::geometry`."""

    _fields_ = (
        *u64("tags", "frames", "set_count", "set_reciprocal"),
        *u32("ways", "line_shift"),
    )


class HostTierStruct(ctypes.Structure):
    """Mirror of `cache::host_tier`."""

    _fields_ = (*u64("tags", "frames"), *u32("subsets", "reserved"))


class LineCacheStruct(ctypes.Structure):
    """Mirror of `cache::line_cache`."""

    _fields_ = (
        ("geometry", GeometryStruct),
        *u64("set_control", "volumes"),
        *u32("page_bytes", "tier_ways"),
        ("tier", HostTierStruct),
        *u32("refusals", "volume_end"),
        ("_pad", ctypes.c_uint8 * 32),
    )


class QueueSpanStruct(ctypes.Structure):
    """Mirror of `cache::queue_span`."""

    _fields_ = u32("first", "count")


class FailureStruct(ctypes.Structure):
    """Mirror of `cache::failure`."""

    _fields_ = (
        *u64("where"),
        *u32("status", "opcode", "number", "reserved"),
        *u64("limit"),
    )


class ErrorRecordStruct(ctypes.Structure):
    """Mirror of `cache::error_record`."""

    _fields_ = (
        ("commands", FailureStruct * FAILURES_KEPT),
        ("indices", FailureStruct * FAILURES_KEPT),
    )


class FailureLogStruct(ctypes.Structure):
    """Mirror of `cache::failure_log`."""

    _fields_ = u32("noted", "read", "untold", "reserved")


class VolumeStruct(ctypes.Structure):
    """Mirror of `cache::volume`."""

    _fields_ = (
        *u64("line_begin", "line_count", "bytes", "queues", "events", "errors"),
        *u32("queue_count", "spread"),
        *u64("lease", "stripe_lines", "replica_writes"),
        *u32("namespace_count", "failed", "path", "attached"),
        ("spans", QueueSpanStruct * NAMESPACES_MAX),
        ("commands", FailureLogStruct),
        ("indices", FailureLogStruct),
        *u32("visitors"),
        ("_pad", ctypes.c_uint8 * 60),
    )


class CountersStruct(ctypes.Structure):
    """Mirror of `cache::counters`."""

    _fields_ = (
        *u64("hits", "misses", "evictions", "write_backs", "bytes_read", "bytes_written"),
        *u64("bytes_used", "errors", "tier_hits", "tier_lines", "kernel_misses"),
        *u64("kernel_bytes_read", "bypasses"),
        ("_reserved", ctypes.c_uint64 * 3),
    )
