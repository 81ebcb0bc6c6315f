"""Batches of commands that a stream waits for; mirrors `nvme/batch.cuh`.

A stream waits for a word in host memory, which the controller stores when the batch's commands are
complete, or when it gives up. The memory is allocated with the queue pairs, never by a call.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

from flashwarp.device import Device
from flashwarp.endings import NotCopied

__all__ = ["Batch", "BatchRecordStruct", "BatchStruct", "Batches"]

_u32 = ctypes.c_uint32


class BatchRecordStruct(ctypes.Structure):
    """Mirror of `nvme::batch_record`."""

    _fields_ = (
        ("submitted", _u32),
        ("completed", _u32),
        ("done", _u32),
        ("watched", _u32),
        ("_pad", ctypes.c_uint8 * 48),
    )


class BatchStruct(ctypes.Structure):
    """Mirror of `nvme::batch`."""

    _fields_ = (
        ("record", ctypes.c_uint64),
        ("number", _u32),
        ("submitted", _u32),
        ("published", _u32),
        ("ended", _u32),
        ("_pad", ctypes.c_uint8 * 40),
    )


class Batch(NamedTuple):
    """One batch, for one launch at a time."""

    address: int
    """Device address of its `BatchStruct`."""
    word: int
    """Address of the word that is 1 when nothing of it is outstanding."""


class Batches(NotCopied):
    """The batches that commands of one controller may name.

    Parameters
    ----------
    device : Device
        Whose kernels submit.
    count : int
    """

    def __init__(self, device: Device, count: int) -> None:
        self._pairs = itertools.count()  # each number goes to one thread
        self.count = count
        self._records = device.allocate_host(count * ctypes.sizeof(BatchRecordStruct))
        self.records = self._records.address
        self._memory = device.allocate(count * ctypes.sizeof(BatchStruct))
        structs = (BatchStruct * count)()
        for i, batch in enumerate(structs):
            batch.record = self.records + i * ctypes.sizeof(BatchRecordStruct)
            batch.number = i + 1
        device.upload(self._memory.address, bytes(structs))

    def take_pair(self) -> tuple[Batch, Batch] | None:
        """Take two batches for as long as the queue pairs exist; None if none are left.

        Any thread may call it, and a signal handler may raise in it: then the two are lost.
        """
        first = 2 * next(self._pairs)
        if first + 2 > self.count:
            return None
        return self._batch(first), self._batch(first + 1)

    def _batch(self, i: int) -> Batch:
        record = self.records + i * ctypes.sizeof(BatchRecordStruct)
        return Batch(
            self._memory.address + i * ctypes.sizeof(BatchStruct),
            record + BatchRecordStruct.done.offset,
        )

    def read(self, batch: Batch) -> BatchRecordStruct:
        """Return a copy of a batch's record, which changes meanwhile."""
        address = batch.word - BatchRecordStruct.done.offset
        return BatchRecordStruct.from_buffer_copy(
            ctypes.string_at(address, ctypes.sizeof(BatchRecordStruct))
        )

    @property
    def owners(self) -> tuple[object, ...]:
        """What holds the memory; see `DeviceMemory.owners`."""
        return (*self._records.owners, *self._memory.owners)

    def close(self) -> None:
        """Free the memory; the controller must have stopped. May be called twice."""
        self._memory.close()
        self._records.close()
