"""The memory in which row kernels list their misses; mirrors `cache/miss_list.cuh`.

A list is allocated with its volume, never by a call.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from flashwarp.device.layouts import fields_of

if TYPE_CHECKING:
    from flashwarp.device import Device, DeviceMemory

# Misses that a list holds at a time, each in 8 bytes. A launch on a GPU of 132 multiprocessors
# leaves 67,584 entries (its lanes) unused, so a shorter list would hold little.
_ENTRIES_MIN = 1 << 17
_ENTRIES_MAX = 1 << 20
_ENTRY_BYTES = 8

# Arrays of fewer lines have no list: it would take a quarter of their bytes.
_LINES_MIN = 1 << 10


class MissListStruct(ctypes.Structure):
    """Mirror of `cache::miss_list`."""

    _fields_ = fields_of("miss_list")


class ListUseStruct(ctypes.Structure):
    """Mirror of `cache::list_use`: how a launch uses a list."""

    _fields_ = fields_of("list_use")


def allocate_misses(
    device: Device, lines: int, stream: object = None, most: int = _ENTRIES_MAX
) -> DeviceMemory | None:
    """Allocate an empty list for an array of so many lines; None if it would be of no use.

    Only launches on a GPU hold multiprocessors, so on the CPU device there is none.
    """
    if device.kind == "cpu" or lines < _LINES_MIN:
        return None
    entries = min(max(1 << (lines - 1).bit_length(), _ENTRIES_MIN), most)
    memory = device.allocate(ctypes.sizeof(MissListStruct) + entries * _ENTRY_BYTES, stream)
    head = MissListStruct(capacity_log2=entries.bit_length() - 1)
    device.upload(memory.address, bytes(head), stream)
    return memory
