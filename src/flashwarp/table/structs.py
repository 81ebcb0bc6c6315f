"""The structs of lookups as device code has them; mirrors of `kernels/table_params.cuh`."""

from __future__ import annotations

import ctypes

from flashwarp.cache.structs import GeometryStruct
from flashwarp.device.layouts import fields_of


class TableScalesStruct(ctypes.Structure):
    """Mirror of `kernels::table_scales`."""

    _fields_ = fields_of("table_scales", geometry=GeometryStruct)


class LookupTableStruct(ctypes.Structure):
    """Mirror of `kernels::lookup_table`."""

    _fields_ = fields_of("lookup_table", geometry=GeometryStruct, scales=TableScalesStruct)


class LookupParams(ctypes.Structure):
    """Mirror of `kernels::lookup_params`."""

    _fields_ = fields_of("lookup_params", table=LookupTableStruct)
