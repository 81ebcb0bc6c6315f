"""What an image's file holds: its newest header, its marks, and whether its tables agree."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashwarp import _native
from flashwarp.errors import FileFormatError
from flashwarp.file.gvdk.layout import (
    BODY,
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
MARKS_SEALER = Sealer(None)
"""Marks protect nothing that a key does: whoever changes them could change the data as well."""


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


class Marks(NamedTuple):
    """What the pages of marks say."""

    bits: bytes
    """One for each range that may have been written since the header was."""
    newest: int
    """The newest generation of a page, or that of the header."""


def marks_of(disk: Disk, header: Header) -> Marks:
    """Read the pages of marks."""
    at = places(header)
    bits, newest = [], header.generation
    for index in range(header.mark_pages):
        page = _page_of_marks(disk.read(at.marks + index * PAGE, PAGE), index, header)
        if page is None:
            # One that was being written says nothing, so all of its ranges may be.
            bits.append(b"\xff" * BODY)
        elif page.generation < header.generation:
            bits.append(bytes(BODY))
        else:
            # That of a sync that did not end has the marks of this generation, too.
            bits.append(page.body)
            newest = max(newest, page.generation)
    return Marks(b"".join(bits), newest)


def _page_of_marks(data: bytes, index: int, header: Header) -> Page | None:
    if not any(data):
        return Page(MARKS, index, 0, bytes(BODY))
    page = Page.unpack(data, MARKS, index, header.identity, MARKS_SEALER)
    return None if page is None or page.generation > header.generation + 1 else page


def marked_ranges(marks: Marks, header: Header) -> tuple[tuple[int, int], ...]:
    """Return the bytes that marks name."""
    marked = np.unpackbits(np.frombuffer(marks.bits, np.uint8), bitorder="little")
    edges = np.flatnonzero(np.diff(marked, prepend=0, append=0))
    ranges = edges.reshape(-1, 2).astype(object) * places(header).range_bytes
    return tuple(
        (int(begin), min(int(end), header.capacity))
        for begin, end in ranges
        if begin < header.capacity
    )


def clear_torn_marks(disk: Disk, header: Header) -> None:
    """Empty the pages of marks that say nothing, once what they may have said is recovered."""
    for index in range(header.mark_pages):
        place = places(header).marks + index * PAGE
        if _page_of_marks(disk.read(place, PAGE), index, header) is None:
            disk.write(place, bytes(PAGE))
    disk.flush()


def inspect(disk: Disk, sealer: Sealer, path: str) -> Report:
    """Look at everything but the data; raises FileFormatError if no header is left."""
    header, problems = newest_header(disk, sealer, path)
    at = places(header)
    for begin, end in marked_ranges(marks_of(disk, header), header):
        problems.append(f"bytes [{begin}, {end}) were written, and not synced")
    if header.type is ImageType.FIXED:
        if disk.nbytes < at.data + header.capacity:
            problems.append("the file ends before its data does")
        return Report(tuple(problems))
    tables = Tables(disk, header, sealer, path)
    native = native_image(disk, header, path)
    for table in tables.load(problems):
        try:
            native.load_table(table.index, table.slot, table.entries)
        except ValueError as error:
            problems.append(str(error))
    tables.check_bitmap(native.used(), problems)
    return Report(tuple(problems))


def native_image(
    disk: Disk,
    header: Header,
    path: str,
    *,
    data: _native.Storage | None = None,
    writable: bool = False,
    marks: bytes = b"",
    sync: Callable[[], int] = lambda: errno.EROFS,
) -> _native.ImageStorage:
    """Return the storage of an image; without data it only counts slots."""
    at = places(header)
    layout = at.data, header.block, at.slots, at.table_slots
    marked = at.marks, at.range_bytes, header.identity, header.generation, marks
    return _native.ImageStorage(
        data, disk.fd, layout, header.capacity, writable, path, marked, sync
    )
