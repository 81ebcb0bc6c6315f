"""The table in which kernels find the arrays of a cache: its entries, and their line numbers.

Kernels of other arrays search it while an entry is written or cleared: see `cache/visits.cuh`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from flashwarp import endings
from flashwarp.cache.structs import VolumeStruct
from flashwarp.device import Device
from flashwarp.errors import CacheError, DeviceTimeout

_LINES_MAX = 1 << 38
# Lines from here on do not enter the host tier: `kTierLines` of the headers.
TIER_LINES = 1 << 37
# Interval at which `withdraw` looks: visits last for microseconds, or as long as a command.
_POLL_S = 50e-6


@dataclass(frozen=True)
class TableEntry:
    """One entry, at an address of device memory."""

    device: Device
    address: int

    def enter(self, struct: VolumeStruct) -> None:
        """Write the entry.

        `line_count` is written last: if it is nonzero, the entry is complete. `visitors` stays,
        because it may still count a visitor that came too late.
        """
        count, struct.line_count = struct.line_count, 0
        self.device.upload(self.address, bytes(struct)[: VolumeStruct.visitors.offset])
        place = self.address + VolumeStruct.line_count.offset
        self.device.upload(place, int(count).to_bytes(8, "little"))

    def clear(self) -> None:
        """Clear the entry, `line_count` first."""
        self.device.fill(self.address + VolumeStruct.line_count.offset, 0, 8)
        self.device.fill(self.address, 0, VolumeStruct.visitors.offset)

    def set_attached(self, value: int) -> None:
        """Say whether kernels of other arrays may use the array's queues."""
        place = self.address + VolumeStruct.attached.offset
        self.device.upload(place, value.to_bytes(4, "little"))

    def _visitors(self) -> int:
        place = self.address + VolumeStruct.visitors.offset
        return int.from_bytes(self.device.download(place, 4), "little")

    def withdraw(self, timeout_s: float) -> None:
        """Keep kernels of other arrays from an array's queues, and wait until none uses them.

        Call it when no kernel of the array runs any more and its lines are at rest, and before you
        free its memory. Its service must run until this returns, because a kernel may wait for a
        write-back of one of its lines. Kernels of other arrays go on, but no longer help its
        queues. May be called twice.

        Raises DeviceTimeout if a kernel uses the queues for `timeout_s` seconds. Then the memory of
        the queues must not be freed while that kernel runs.
        """
        self.set_attached(0)
        # Store-load order against visitors, which count themselves and then load `attached`: on a
        # GPU the store has reached memory before the load below begins. On the CPU device it needs
        # a barrier between, which a lock gives.
        with endings.Lock():
            end = time.monotonic() + timeout_s
        while inside := self._visitors():
            if time.monotonic() >= end:
                raise DeviceTimeout(
                    f"kernels of other arrays on the cache are still inside the queues of the "
                    f"array after {timeout_s:g} s ({inside} warps): end them before you close it"
                )
            time.sleep(_POLL_S)


def line_numbers(host_memory: int, route: str) -> range:
    """Return the range of a volume's line numbers, which decides whether it uses the tier."""
    if not host_memory:
        return range(_LINES_MAX)
    return range(TIER_LINES, _LINES_MAX) if route == "in_place" else range(TIER_LINES)


def free_lines(
    count: int, line_bytes: int, taken: Iterable[tuple[int, int]], numbers: range
) -> int:
    """Return the first of so many line numbers that no volume has; raises CacheError.

    `taken` has the first line of each volume and how many it has.
    """
    begin = numbers.start
    for first, lines in sorted(taken):
        if first not in numbers:
            continue
        if first - begin >= count:
            break
        begin = first + lines
    if begin + count > numbers.stop:
        raise CacheError(
            f"{count} lines of {line_bytes} bytes exceed the {len(numbers)} line numbers "
            "of a cache: use longer lines"
        )
    return begin
