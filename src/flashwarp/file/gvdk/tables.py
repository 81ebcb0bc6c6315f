"""The tables of a sparse image in its file: L1, L2 and the bitmap of slots.

Each page has two copies, of which one is current. A change goes to the other copy, with the next
generation. It counts once the header has that generation, which is written last. So a crash leaves
all tables of one generation, whatever it left of the copies that were being written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashwarp import _native
from flashwarp.file.gvdk.layout import (
    BITS,
    BODY,
    PAGE,
    ROOT_ENTRIES,
    TABLE_ENTRIES,
    DamagedImageError,
    Header,
    Page,
    Sealer,
    places,
)

ROOT, TABLE, BITMAP = b"GVL1", b"GVL2", b"GVBM"


class Disk:
    """The file of an image, for pages: every call moves all bytes, or raises OSError."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return os.fstat(self.fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes; those behind the end of the file are missing."""
        data = bytearray(max(0, min(nbytes, self.nbytes - offset)))
        return bytes(data[: _native.read_file(self.fd, offset, data)])

    def write(self, offset: int, data: bytes) -> None:
        """Store bytes."""
        _native.write_file(self.fd, offset, data)

    def flush(self) -> None:
        """Make all bytes of the file durable."""
        os.fdatasync(self.fd)

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that may hold something else than zeros."""
        end = min(end, self.nbytes)
        while begin < end:
            try:
                begin = os.lseek(self.fd, begin, os.SEEK_DATA)
                hole = os.lseek(self.fd, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                hole = end  # a file system that knows no holes
            if begin < end:
                yield begin, min(hole, end)
            begin = hole


class _Copy(NamedTuple):
    number: int
    page: Page


@dataclass(frozen=True)
class Table:
    """An L2 table: where it lies, and the slots of its blocks, plus one; 0 for none."""

    index: int
    slot: int
    entries: NDArray[np.uint64]
    stale: bool = False  # whether it is an older one, because the current one is damaged


@dataclass
class _State:
    """The pages of one generation."""

    roots: dict[int, _Copy] = field(default_factory=dict)
    bitmap: dict[int, _Copy] = field(default_factory=dict)
    tables: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Slot, copy and generation."""

    def copy(self) -> _State:
        return _State(dict(self.roots), dict(self.bitmap), dict(self.tables))

    def root_of(self, sealer: Sealer) -> bytes:
        """Return the checksum of all pages of L1 and bitmap, which the header has."""
        return sealer.tag(
            b"".join(
                magic + index.to_bytes(8, "little") + pages[index].page.tag
                for magic, pages in ((ROOT, self.roots), (BITMAP, self.bitmap))
                for index in sorted(pages)
            )
        )


class Tables:
    """All tables of a sparse image."""

    def __init__(self, disk: Disk, header: Header, sealer: Sealer, path: str) -> None:
        self._disk = disk
        self._header = header
        self._sealer = sealer
        self._path = path
        self._places = places(header)
        self._state = self._next = _State()
        # Pages of which a sync that did not end has left a newer copy. It would count from the
        # next header on, so the next sync writes over it.
        self._newer: set[tuple[bytes, int]] = set()

    # Reading.

    def load(self, problems: list[str] | None = None) -> Iterator[Table]:
        """Read everything, and yield the L2 tables.

        Raises DamagedImageError, unless there are `problems`, to which it adds what is wrong; it
        then yields what is left, and `lost` names the tables that are not.
        """
        self.lost: set[int] = set()
        at = self._places
        newest = self._header.generation
        state = self._state = _State()
        for magic, begin, count, found in (
            (ROOT, at.roots, at.root_pages, state.roots),
            (BITMAP, at.bitmap, at.bitmap_pages, state.bitmap),
        ):
            for index in self._present(begin, count):
                copies = self._copies(magic, index, begin + index * 2 * PAGE)
                current = [each for each in copies if each.page.generation <= newest]
                if len(current) != len(copies):
                    self._newer.add((magic, index))
                if current:
                    found[index] = max(current, key=lambda each: each.page.generation)
                elif problems is not None:
                    self._miss(magic, index, copies, found)
        if state.root_of(self._sealer) != self._header.root:
            self._complain(problems, "pages of L1 or bitmap are not those of the header")
        for index, root in sorted(state.roots.items()):
            yield from self._tables_of(index, root.page.body, problems)

    def _miss(self, magic: bytes, index: int, copies: list[_Copy], found: dict[int, _Copy]) -> None:
        """Take what is left of a page that has no current copy, in an image to be repaired."""
        if copies:
            found[index] = copies[0]
        elif magic == ROOT:
            self.lost.update(range(index * ROOT_ENTRIES, (index + 1) * ROOT_ENTRIES))

    def _tables_of(self, root: int, body: bytes, problems: list[str] | None) -> Iterator[Table]:
        at = self._places
        for place, (slot, generation) in enumerate(np.frombuffer(body, "<u8").reshape(-1, 2)):
            if not slot:
                if generation:
                    self._complain(problems, f"L1 page {root}: a generation without a table")
                continue
            index, number = root * ROOT_ENTRIES + place, int(slot) - 1
            if index * TABLE_ENTRIES * self._header.block >= self._header.capacity:
                self._complain(problems, f"L2 table {index} lies behind the capacity")
                continue
            if number + at.table_slots > at.slots:
                self._complain(problems, f"L2 table {index} lies outside of the file")
                self.lost.add(index)
                continue
            copies = self._copies(TABLE, index, at.data + number * self._header.block)
            wanted = [each for each in copies if each.page.generation == int(generation)]
            if not wanted:
                self._complain(problems, f"L2 table {index} is not what was written")
                wanted = sorted(copies, key=lambda each: -each.page.generation)
                if not wanted:
                    self.lost.add(index)
            for copy in wanted[:1]:
                self._state.tables[index] = number, copy.number, copy.page.generation
                entries = np.frombuffer(copy.page.body, "<u8")
                yield Table(index, number, entries, copy.page.generation != int(generation))

    def check_bitmap(self, used: bytes, problems: list[str] | None = None) -> None:
        """Compare the bitmap with the slots that the tables name."""
        wanted = _bitmap_pages(used)
        found = {index: copy.page.body for index, copy in self._state.bitmap.items()}
        for index in sorted(wanted.keys() | found.keys()):
            if wanted.get(index, bytes(BODY)) != found.get(index, bytes(BODY)):
                self._complain(
                    problems,
                    f"bitmap page {index} (slots from {index * BITS} on) is not what L2 tables say",
                )

    def _present(self, begin: int, count: int) -> list[int]:
        pages: set[int] = set()
        for first, end in self._disk.ranges(begin, begin + count * 2 * PAGE):
            pages.update(range((first - begin) // (2 * PAGE), -(-(end - begin) // (2 * PAGE))))
        return sorted(pages)

    def _copies(self, magic: bytes, index: int, offset: int) -> list[_Copy]:
        data = self._disk.read(offset, 2 * PAGE)
        found = []
        for number in range(2):
            page = Page.unpack(
                data[number * PAGE : (number + 1) * PAGE],
                magic,
                index,
                self._header.identity,
                self._sealer,
            )
            if page is not None:
                found.append(_Copy(number, page))
        return found

    def _complain(self, problems: list[str] | None, what: str) -> None:
        if problems is None:
            raise DamagedImageError(
                f"{self._path}: {what}: `flashwarp file verify` looks for more, and `flashwarp "
                "file repair` makes what is left usable"
            )
        problems.append(what)

    # Writing.

    def write(
        self, changed: Iterable[Table], used: bytes, generation: int, *, all_there_are: bool = False
    ) -> bytes:
        """Write changed tables, and what points to them; return the new root.

        It counts after `commit`, once a header with the generation and the root is durable. If
        these are all tables that there are, others that were read are given up.
        """
        state = self._state.copy()
        at = self._places
        touched = {index for magic, index in self._newer if magic == ROOT}
        if all_there_are:
            changed = list(changed)
            kept = {table.index for table in changed}
            state.tables = {index: each for index, each in state.tables.items() if index in kept}
            touched.update(state.roots)
        for table in changed:
            _, number, _ = state.tables.get(table.index, (0, 1, 0))
            page = Page(TABLE, table.index, generation, table.entries.tobytes())
            offset = at.data + table.slot * self._header.block + (1 - number) * PAGE
            self._put(page, offset)
            state.tables[table.index] = table.slot, 1 - number, generation
            touched.add(table.index // ROOT_ENTRIES)
        for index in sorted(touched):
            body = np.zeros((ROOT_ENTRIES, 2), "<u8")
            for place in range(ROOT_ENTRIES):
                known = state.tables.get(index * ROOT_ENTRIES + place)
                if known is not None:
                    body[place] = known[0] + 1, known[2]
            self._put_pair(state.roots, ROOT, index, body.tobytes(), at.roots, generation)
        wanted = _bitmap_pages(used)
        newer = {index for magic, index in self._newer if magic == BITMAP}
        for index in sorted(wanted.keys() | state.bitmap.keys() | newer):
            body_now = wanted.get(index, bytes(BODY))
            current = state.bitmap.get(index)
            if index in newer or current is None or current.page.body != body_now:
                self._put_pair(state.bitmap, BITMAP, index, body_now, at.bitmap, generation)
        self._next = state
        return state.root_of(self._sealer)

    def commit(self, header: Header) -> None:
        """Take what was written as current."""
        self._header = header
        self._state = self._next
        self._newer.clear()

    def _put_pair(
        self,
        pages: dict[int, _Copy],
        magic: bytes,
        index: int,
        body: bytes,
        begin: int,
        generation: int,
    ) -> None:
        number = 1 - pages[index].number if index in pages else 0
        self._newer.add((magic, index))
        page = Page(magic, index, generation, body)
        pages[index] = _Copy(number, self._put(page, begin + (2 * index + number) * PAGE))

    def _put(self, page: Page, offset: int) -> Page:
        data = page.pack(self._header.identity, self._sealer)
        self._disk.write(offset, data)
        return page._replace(tag=data[64:96])


def _bitmap_pages(used: bytes) -> dict[int, bytes]:
    """Return the pages of a bitmap that have bits."""
    pages = {}
    for begin in range(0, len(used), BODY):
        body = used[begin : begin + BODY].ljust(BODY, b"\0")
        if any(body):
            pages[begin // BODY] = body
    return pages
