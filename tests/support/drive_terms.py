"""Queue pairs of the software controller, put in a drive's terms: it stands for the drive."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from flashwarp.nvme.queue_pair import (
    DriveAddressingStruct,
    NamespacePart,
    QueuePairs,
    QueuePairStruct,
)

_REGISTER = 1


def put_in_terms_of_a_drive(
    queues: QueuePairs, lba_shift: int = 9, extents: Sequence[NamespacePart] = ()
) -> None:
    """Let kernels ring registers, and address blocks and memory as for a drive.

    The software controller counts blocks of 512 bytes, so `lba_shift` is 9 for what it serves.
    """
    regions = queues.buffer_regions
    begin = regions[0][0] if regions else 0
    place = DriveAddressingStruct(begin=begin, page_bytes=4096, nsid=1, lba_shift=lba_shift)
    device = queues.device
    table = NamespacePart.table(extents)
    memory = device.allocate(ctypes.sizeof(place) + len(table))
    if extents:
        place.extents, place.extent_count = memory.address + ctypes.sizeof(place), len(extents)
    device.upload(memory.address, bytes(place) + table)
    for i in range(queues.count):
        at = queues.address + i * ctypes.sizeof(QueuePairStruct)
        kind, drive = QueuePairStruct.doorbell_kind.offset, QueuePairStruct.drive.offset
        device.upload(at + kind, _REGISTER.to_bytes(4, "little"))
        device.upload(at + drive, memory.address.to_bytes(8, "little"))
    queues.place_of_test = memory  # type: ignore[attr-defined]  # lives as long
