"""What a power cut may leave of an image: a record of writes and syncs, and the files it allows.

Until a sync, each sector of a write may be lost, whatever its neighbours hold, and so may the
file's new size. The record is made below the C library, by `disk_recorder.c`.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flashwarp.file.gvdk import Gvdk
from support import compiled

SECTOR = 512
_HEAD = struct.Struct("<QQQ")
_WRITE, _SIZE, _SYNC, _MARK = range(4)


@dataclass
class Event:
    """What happened: bytes were written, the file was cut or synced, or the program came so far."""

    pieces: list[tuple[int, bytes]] = field(default_factory=list)  # within a sector each
    size: int | None = None
    synced: bool = False
    mark: int | None = None


def recorded(program: str, path: Path, *arguments: object) -> tuple[str, Record]:
    """Run a program that calls `begin` with the path; return what it prints, and the record."""
    recorder = compiled.library(Path(__file__).with_name("disk_recorder.c"), "disk_recorder.so")
    first, events = path.read_bytes(), path.with_suffix(".events")
    ran = subprocess.run(
        [sys.executable, "-m", program, str(path), str(events), *map(str, arguments)],
        env={**os.environ, "LD_PRELOAD": str(recorder), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout, Record(first, list(_read(events.read_bytes())))


def begin(path: str, events: str) -> Callable[[int], None]:
    """Record what happens to a file from now on; returns what notes how far the program is."""
    recorder = ctypes.CDLL(None)
    recorder.record_begin(os.open(path, os.O_RDONLY), os.open(events, os.O_WRONLY | os.O_CREAT))
    recorder.record_mark.argtypes = [ctypes.c_uint64]
    return recorder.record_mark


def _read(data: bytes) -> Iterator[Event]:
    at = 0
    while at < len(data):
        kind, first, second = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if kind == _WRITE:
            yield Event(pieces=list(_pieces(first, data[at : at + second])))
            at += second
        elif kind == _SIZE:
            yield Event(size=first)
        else:
            yield Event(synced=True) if kind == _SYNC else Event(mark=first)


def _pieces(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    done = 0
    while done < len(data):
        step = SECTOR - (offset + done) % SECTOR
        yield offset + done, data[done : done + step]
        done += step


@dataclass
class Record:
    """A file as it was, and what happened to it."""

    first: bytes
    events: list[Event]

    def states(self, each: int, seed: int) -> Iterator[tuple[bytes, list[int]]]:
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
        for begins, piece in event.pieces:
            if choose():
                content = content.ljust(begins + len(piece), b"\0")
                content[begins : begins + len(piece)] = piece
    return content


def content_of(image: Gvdk) -> bytes:
    """Return all bytes of an image up to its capacity."""
    return image.read(0, image.capacity)
