"""The structs of batches as device code has them; mirrors of `batch/*.cuh` and `batch.cuh`.

A test compares their layouts with the headers.
"""

from __future__ import annotations

import ctypes

from flashwarp.cache.structs import FailureLogStruct
from flashwarp.device.layouts import fields_of
from flashwarp.nvme.queue_pair import TransportStruct


class RequestStruct(ctypes.Structure):
    """Mirror of `batch::request`."""

    _fields_ = fields_of("batch_request")


class RegionsStruct(ctypes.Structure):
    """Mirror of `batch::regions`."""

    _fields_ = fields_of("batch_regions")


class SlotStateStruct(ctypes.Structure):
    """Mirror of `batch::slot_state`."""

    _fields_ = fields_of("batch_slot_state")


class DirectionStruct(ctypes.Structure):
    """Mirror of `batch::direction`."""

    _fields_ = fields_of(
        "batch_direction", shared=RegionsStruct, limit=TransportStruct, log=FailureLogStruct
    )


class PipelineStruct(ctypes.Structure):
    """Mirror of `fw::pipeline`, a kernel's parameter."""

    _fields_ = fields_of("pipeline")
