"""What a power cut may leave of an image: a record of writes and syncs, and the files it allows.

Until a sync, each sector of a write may be lost, whatever its neighbours hold, and so may the
file's new size. Data is written by native code, so changes of the file are found by comparing it
with what it held before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flashwarp.file.gvdk import Gvdk
from flashwarp.file.gvdk.tables import Disk

SECTOR = 512


@dataclass
class Event:
    """What happened: sectors were written, the file was synced, or the test has come so far."""

    sectors: dict[int, bytes] = field(default_factory=dict)
    size: int | None = None
    synced: bool = False
    mark: Any = None


class Recorder:
    """Records what happens to the file of an image, while it is open."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._path = path
        self.first = self._content = path.read_bytes()
        self.events: list[Event] = []
        write, sync = Disk.write, Disk.flush

        def recorded_write(disk: Disk, offset: int, data: bytes) -> None:
            self.look()
            write(disk, offset, data)
            self.look()

        def recorded_sync(disk: Disk) -> None:
            self.look()
            sync(disk)
            self.events.append(Event(synced=True))

        patch.setattr(Disk, "write", recorded_write)
        patch.setattr(Disk, "flush", recorded_sync)

    def look(self) -> None:
        """Note what has changed in the file since the last look."""
        now, before = self._path.read_bytes(), self._content
        if now == before:
            return
        event = Event(size=len(now) if len(now) != len(before) else None)
        for begin in range(0, len(now), SECTOR):
            sector = now[begin : begin + SECTOR]
            if sector != before[begin : begin + SECTOR].ljust(len(sector), b"\0"):
                event.sectors[begin] = sector
        self.events.append(event)
        self._content = now

    def mark(self, what: Any) -> None:
        """Note that the test has come so far."""
        self.look()
        self.events.append(Event(mark=what))

    def states(self, each: int, seed: int) -> Iterator[tuple[bytes, list[Any]]]:
        """Yield files that a cut may leave, and the marks before it.

        For each event: nothing of what was not synced is left, all of it, and `each` times a part.
        """
        chooser = random.Random(seed)
        durable, pending, marks = bytearray(self.first), [], []
        for event in self.events:
            if event.mark is not None:
                marks.append(event.mark)
                continue
            if event.synced:
                durable = _left(durable, pending, lambda: True)
                pending = []
            else:
                pending.append(event)
            for choose in [lambda: False, lambda: True, *[_coin(chooser) for _ in range(each)]]:
                yield bytes(_left(durable, pending, choose)), list(marks)


def _coin(chooser: random.Random) -> Callable[[], bool]:
    share = chooser.random()
    return lambda: chooser.random() < share


def _left(durable: bytearray, pending: list[Event], choose: Callable[[], bool]) -> bytearray:
    content = bytearray(durable)
    for event in pending:
        if event.size is not None and choose():
            content = content[: event.size].ljust(event.size, b"\0")
        for begin, sector in event.sectors.items():
            if choose():
                content = content.ljust(begin + len(sector), b"\0")
                content[begin : begin + len(sector)] = sector
    return content


def content_of(image: Gvdk) -> bytes:
    """Return all bytes of an image up to its capacity."""
    return image.read(0, image.capacity)
