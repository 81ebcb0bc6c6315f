"""The structs of lookups as device code has them; mirrors of `kernels/table.cuh`."""

from __future__ import annotations

import ctypes

from flashwarp.cache.structs import GeometryStruct
from flashwarp.nvme.queue_pair import u32, u64

__all__ = ["LookupParams", "LookupTableStruct", "TableScalesStruct"]


class TableScalesStruct(ctypes.Structure):
    """Mirror of `kernels::table_scales`."""

    _fields_ = (
        ("geometry", GeometryStruct),
        *u64("cache", "volume", "memory", "stride"),
        *u32("columns", "number", "row_shift", "divides"),
        ("whole", ctypes.c_float),
        *u32("reserved"),
    )


class LookupTableStruct(ctypes.Structure):
    """Mirror of `kernels::lookup_table`."""

    _fields_ = (
        ("geometry", GeometryStruct),
        *u64("cache", "volume", "row_bytes", "row_begin", "row_count", "padding", "out_column"),
        ("scales", TableScalesStruct),
        *u32("number", "dim", "word_bytes", "words", "lanes", "straddles"),
    )


class LookupParams(ctypes.Structure):
    """Mirror of `kernels::lookup_params`."""

    _fields_ = (
        ("table", LookupTableStruct),
        *u64("tables", "ids", "offsets", "weights", "out"),
        *u64("id_count", "bags", "bag_ids", "offset_count", "out_stride", "run"),
        *u64("warp_items", "look_ahead"),
        *u32("table_count", "index_bytes", "offset_bytes"),
        *u32("weight_number", "out_number", "pooling"),
    )
