"""One array's place in a cache: its line numbers, its entry in the table, counters and failures."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any

from flashwarp.cache.failures import FailureSequence
from flashwarp.cache.miss_list import allocate_misses
from flashwarp.cache.structs import (
    CountersStruct,
    ErrorRecordStruct,
    FailureLogStruct,
    VolumeStruct,
)
from flashwarp.cache.volume_table import TIER_LINES, TableEntry
from flashwarp.device import Device, DeviceMemory, OwnedStream

# Misses that the list of an asynchronous call holds: 2 MiB, of which an array may have 64.
_LANE_MISSES_MAX = 1 << 18


@dataclass
class Volume:
    """One array's place in a cache."""

    cache: Any
    """The `Cache`, which knows its volumes."""
    slot: int
    line_begin: int
    line_count: int
    address: int
    events: DeviceMemory
    errors: DeviceMemory
    misses: DeviceMemory | None = None
    """Where launches list their misses; None if they fetch them at once."""
    entry: DeviceMemory | None = None
    """The memory of the struct if this is a copy; else the struct lies in the cache's table."""
    stream: OwnedStream | None = None
    """The stream that orders changes of the struct, if this is a copy."""
    commands: FailureSequence = field(init=False)
    """Commands that failed."""
    indices: FailureSequence = field(init=False)
    """Indices out of bounds."""

    def __post_init__(self) -> None:
        record = ErrorRecordStruct.from_address(self.errors.address)
        place, device = self.address, self.device
        self.commands = FailureSequence(
            record.commands, place + VolumeStruct.commands.offset, device, self.stream
        )
        self.indices = FailureSequence(
            record.indices, place + VolumeStruct.indices.offset, device, self.stream
        )

    @property
    def device(self) -> Device:
        """Where the cache lies."""
        device: Device = self.cache.device
        return device

    @property
    def table_entry(self) -> TableEntry:
        """Its entry in the cache's table."""
        return TableEntry(self.device, self.address)

    @property
    def in_host_tier(self) -> bool:
        """Whether its lines enter the host tier of the cache."""
        return self.cache.host_memory != 0 and self.line_begin < TIER_LINES

    def tier_note(self) -> str:
        """Return for `explain` why the lines do not enter the host tier; empty if they do."""
        if not self.cache.host_memory or self.in_host_tier:
            return ""
        return "; this array's lines do not enter its host memory: their storage is memory already"

    def with_own_errors(self, stream: OwnedStream) -> Volume:
        """Copy the entry, so that its kernels note failures separately. Release the copy.

        It shares lines, queues and counters with the array. `stream` must carry such copies only,
        because kernels on the library's own stream may run for long.
        """
        device = self.device
        errors = device.allocate_host(ctypes.sizeof(ErrorRecordStruct))
        misses = allocate_misses(device, self.line_count, stream, _LANE_MISSES_MAX)
        entry = device.allocate(ctypes.sizeof(VolumeStruct), stream)
        there = device.download(self.address, entry.nbytes, stream)
        struct = VolumeStruct.from_buffer_copy(there)
        struct.errors = errors.address
        struct.commands = struct.indices = FailureLogStruct()
        device.upload(entry.address, bytes(struct), stream)
        return replace(
            self, address=entry.address, errors=errors, misses=misses, entry=entry, stream=stream
        )

    @property
    def owners(self) -> tuple[object, ...]:
        """The owners of its memory, for launches; see `DeviceMemory.owners`."""
        entry = () if self.entry is None else self.entry.owners
        return *self.events.owners, *self.errors.owners, *entry

    def release(self) -> None:
        """Free its memory; a copy shares the counters with the array."""
        for memory in (self.events if self.entry is None else self.entry, self.errors, self.misses):
            if memory is not None:
                memory.close()

    def counters(self, stream: OwnedStream | None = None) -> dict[str, int]:
        """Read the sums over all shards, in the order of `stream`."""
        data = self.device.download(self.events.address, self.events.nbytes, stream)
        return CountersStruct.sums(data)
