"""Failures that kernels note: a ring of entries that the host reads without a transfer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flashwarp import _native, endings
from flashwarp.cache.structs import FAILURES_KEPT, FailureLogStruct, FailureStruct
from flashwarp.device import Device, OwnedStream
from flashwarp.errors import DeviceError


@dataclass(frozen=True)
class Noted:
    """Failures of one kind since the last read: the entries of some, and the number of all."""

    kept: tuple[FailureStruct, ...]
    count: int

    def __bool__(self) -> bool:
        return self.count != 0


_NOTHING = Noted((), 0)


class FailureSequence:
    """A sequence of failures that kernels append to, and how far the host has read it.

    Any thread may read. The host never writes words that kernels own, so a read misses nothing: the
    next read returns what kernels note meanwhile.

    Kernels write `entries` in host memory, and the `FailureLogStruct` at the device address `log`,
    which is read and changed in the order of `stream`.
    """

    def __init__(
        self,
        entries: ctypes.Array[FailureStruct],
        log: int,
        device: Device,
        stream: OwnedStream | None,
    ) -> None:
        self._entries = entries
        self._log = log
        self._device = device
        self._stream = stream
        self._lock = endings.Lock()
        # How many entries were read.
        self.mark = _native.FailureMark(
            ctypes.addressof(entries) + FailureStruct.number.offset,
            ctypes.sizeof(FailureStruct),
            FAILURES_KEPT,
        )
        self._acknowledged = 0  # of them
        self._untold = 0

    @property
    def unread(self) -> bool:
        """Whether kernels have noted a failure that was not read; needs no transfer.

        False, too, if they found the record full after the last read: the next `read` finds those.
        """
        return self.mark.unread

    def first(self) -> FailureStruct | None:
        """Return the oldest unread failure and leave it unread; needs no transfer."""
        return self._entry(self.mark.read)

    def read(self) -> Noted:
        """Return the failures since the last call; needs no transfer if there is none.

        After the first eight entries, later failures may have found the ring full, so each call
        reads their number from the device: a transfer of 4 bytes. If the device fails, so that the
        host cannot acknowledge entries, they stay unread.
        """
        if self.mark.read < FAILURES_KEPT and not self.mark.unread:
            return _NOTHING
        return endings.holding([self._lock], self._read_on)

    def _read_on(self) -> Noted:
        kept: list[FailureStruct] = []
        while len(kept) < FAILURES_KEPT:
            entry = self._entry(self.mark.read + len(kept))
            if entry is None:
                break
            kept.append(FailureStruct.from_buffer_copy(entry))
        before, end = self.mark.read, self.mark.read + len(kept)
        untold = self._download_untold() if end >= FAILURES_KEPT else 0
        count = len(kept) + (untold - self._untold & 0xFFFFFFFF)
        # Advance before acknowledging, because an interrupt may come between: kernels may overwrite
        # acknowledged entries, so these must count as read. The next call acknowledges the rest.
        self.mark.read = end
        try:
            self._acknowledge()
        except DeviceError:
            self.mark.read = before
            raise
        self._untold = untold
        return Noted(tuple(kept), count)

    def _acknowledge(self) -> None:
        if self._acknowledged != self.mark.read:
            word = (self.mark.read & 0xFFFFFFFF).to_bytes(4, "little")
            self._device.upload(self._log + FailureLogStruct.read.offset, word, self._stream)
            self._acknowledged = self.mark.read

    def _entry(self, position: int) -> FailureStruct | None:
        # Kernels write the number last: with it, the entry is complete.
        entry = self._entries[position % FAILURES_KEPT]
        return entry if entry.number == (position + 1) & 0xFFFFFFFF else None

    def _download_untold(self) -> int:
        place = self._log + FailureLogStruct.untold.offset
        return int.from_bytes(self._device.download(place, 4, self._stream), "little")
