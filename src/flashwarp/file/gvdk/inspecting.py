"""What an image's file holds: its newest header, its marks, and whether its tables agree."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import numpy as np

from flashwarp import _native
from flashwarp.errors import FileFormatError
from flashwarp.file.gvdk.layout import (
    BITS,
    HEADERS,
    MAGIC,
    PAGE,
    DamagedImageError,
    Header,
    ImageType,
    Page,
    Sealer,
    places,
)
from flashwarp.file.gvdk.tables import Disk, Tables
from flashwarp.storage import files

MARKS = b"GVDM"


def is_gvdk(path: files.PathLike) -> bool:
    """Return whether a file begins as an image does."""
    with files.open_for_reading(files.check_name(path)) as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True)
class Recovered:
    """What an image may have lost because nobody closed it."""

    generation: int
    """Of the last sync."""
    ranges: tuple[tuple[int, int], ...]
    """Bytes [begin, end) that were written since: they may be old, new, or a part of each. All
    others, and the size, are those of the last sync."""


@dataclass(frozen=True)
class Report:
    """What `verify` found, or `repair` mended."""

    problems: tuple[str, ...]
    lost: tuple[tuple[int, int], ...] = ()
    """Bytes [begin, end) that nothing names any more: they read as zeros, or as they were in an
    earlier generation."""

    @property
    def clean(self) -> bool:
        """Whether there was no problem."""
        return not self.problems


def newest_header(disk: Disk, sealer: Sealer, path: str) -> tuple[Header, list[str]]:
    """Return the newest header, and what is wrong with a copy."""
    found: list[Header] = []
    errors: list[FileFormatError] = []
    for copy in range(HEADERS):
        try:
            found.append(Header.unpack(disk.read(copy * PAGE, PAGE), sealer, path))
        except FileFormatError as error:
            # Without its frames, which hold the file open.
            errors.append(error.with_traceback(None))
    if not found:
        # What is no damage says more.
        raise min(errors, key=lambda error: isinstance(error, DamagedImageError))
    newest = max(found, key=lambda header: header.generation)
    return newest, [str(error) for error in errors]


def marked_ranges(disk: Disk, header: Header, sealer: Sealer) -> tuple[tuple[int, int], ...]:
    """Return the bytes that may have been written since the header was."""
    at = places(header)
    bits = []
    for index in range(header.mark_pages):
        data = disk.read(at.marks + index * PAGE, PAGE)
        page = Page.unpack(data, MARKS, index, header.identity, sealer)
        if page is not None and page.generation == header.generation:
            bits.append(np.frombuffer(page.body, np.uint8))
        else:
            # A page that was being written says nothing, so all of its ranges may be.
            torn = page is None and any(data)
            bits.append(np.full(BITS // 8, 255 if torn else 0, np.uint8))
    marks = np.unpackbits(np.concatenate(bits), bitorder="little")
    edges = np.flatnonzero(np.diff(marks, prepend=0, append=0))
    ranges = edges.reshape(-1, 2).astype(object) * at.range_bytes
    return tuple(
        (int(begin), min(int(end), header.capacity))
        for begin, end in ranges
        if begin < header.capacity
    )


def clear_torn_marks(disk: Disk, header: Header, sealer: Sealer) -> None:
    """Empty the pages of marks that say nothing, once what they may have said is recovered."""
    for index in range(header.mark_pages):
        place = places(header).marks + index * PAGE
        data = disk.read(place, PAGE)
        if any(data) and Page.unpack(data, MARKS, index, header.identity, sealer) is None:
            disk.write(place, bytes(PAGE))
    disk.flush()


def inspect(disk: Disk, sealer: Sealer, path: str) -> Report:
    """Look at everything but the data; raises FileFormatError if no header is left."""
    header, problems = newest_header(disk, sealer, path)
    at = places(header)
    for begin, end in marked_ranges(disk, header, sealer):
        problems.append(f"bytes [{begin}, {end}) were written, and not synced")
    if header.type is ImageType.FIXED:
        if disk.nbytes < at.data + header.capacity:
            problems.append("the file ends before its data does")
        return Report(tuple(problems))
    tables = Tables(disk, header, sealer, path)
    native = slots_of(disk, header, path)
    for table in tables.load(problems):
        try:
            native.load_table(table.index, table.slot, table.entries)
        except ValueError as error:
            problems.append(str(error))
    tables.check_bitmap(native.used(), problems)
    return Report(tuple(problems))


def slots_of(disk: Disk, header: Header, path: str) -> _native.ImageStorage:
    """Return a storage that only counts slots."""
    at = places(header)
    layout = at.data, header.block, at.range_bytes, at.slots, at.table_slots
    return _native.ImageStorage(
        None, disk.fd, layout, header.capacity, False, path, _refuses, _refuses
    )


def _refuses(*_: object) -> int:
    return errno.EROFS
