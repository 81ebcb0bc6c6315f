"""Where everything lies in a GVDK image, and its pages; docs/files.md describes them for people.

All numbers are little endian. Header and tables are pages of 4 KiB, each with a checksum. What a
page says of places is never trusted: places follow from few numbers of the header, which must
agree with them.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from flashwarp import _native
from flashwarp.errors import FileFormatError

MAGIC = b"GVDK\r\n\x1a\n"
"""The first bytes. A transfer as text, or by 7 bits, would change them."""
VERSION = 1
BYTE_ORDER = 0x01020304

PAGE = 4096
HEADERS = 2
BODY = 4000
BITS = BODY * 8
"""Bits of a page of a bitmap."""
TABLE_ENTRIES = BODY // 8
"""Blocks of an L2 table."""
ROOT_ENTRIES = BODY // 16
"""L2 tables of a page of the L1 table."""

BLOCK_MIN, BLOCK_MAX = 4096, 2 << 20
CAPACITY_MAX = 16 << 40
GENERATION_MAX = 1 << 62
MARK_PAGES_MAX = 64

_CHECKSUMS = {False: 1, True: 2}  # CRC-32C, HMAC-SHA256

# magic, version, byte order, bytes of a page, type, generation, identity, block, mode, checksum
# kind, pages of marks, size, capacity, begin of marks, of L1, of the bitmap, of slots, slots, root
_HEADER = struct.Struct("<8sIIIIQ16sIIIIQQQQQQQ32s")
_TAG_AT = PAGE - 32
# magic, reserved, index, generation, identity
_PAGE = struct.Struct("<4sIQQ16s24x")
_PAGE_TAG_AT = _PAGE.size
_BODY_AT = 96
assert _PAGE_TAG_AT + 32 == _BODY_AT
assert _BODY_AT + BODY == PAGE


class DamagedImageError(FileFormatError):
    """An image whose header or tables are not what was written; none of its bytes are given out.

    `Gvdk.repair` makes what is left usable.
    """


class ImageType(IntEnum):
    """How blocks find their slots."""

    FIXED = 1
    SPARSE = 2


class Sealer:
    """Checksums of pages: CRC-32C against accidents, or HMAC-SHA256 with a key against forgery."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    @property
    def keyed(self) -> bool:
        """Whether it has a key."""
        return self._key is not None

    def tag(self, data: bytes | bytearray) -> bytes:
        """Return the 32 bytes that belong to `data`."""
        if self._key is not None:
            return hmac.digest(self._key, data, "sha256")
        return _native.crc32c(data).to_bytes(4, "little") + bytes(28)

    def agrees(self, data: bytes | bytearray, tag: bytes) -> bool:
        """Return whether a tag belongs to `data`."""
        return hmac.compare_digest(self.tag(data), tag)


class Page(NamedTuple):
    """A page of a table: which one, of when, and what it holds."""

    magic: bytes
    number: int
    generation: int
    body: bytes
    tag: bytes = b""

    def pack(self, identity: bytes, sealer: Sealer) -> bytes:
        """Return its bytes."""
        page = bytearray(PAGE)
        _PAGE.pack_into(page, 0, self.magic, 0, self.number, self.generation, identity)
        page[_BODY_AT : _BODY_AT + len(self.body)] = self.body
        page[_PAGE_TAG_AT:_BODY_AT] = sealer.tag(page)
        return bytes(page)

    @staticmethod
    def unpack(
        data: bytes, magic: bytes, number: int, identity: bytes, sealer: Sealer
    ) -> Page | None:
        """Return the page that `data` holds; None if it is not that page of this image."""
        if len(data) != PAGE:
            return None
        found, reserved, found_number, generation, owner = _PAGE.unpack_from(data)
        if (found, reserved, found_number, owner) != (magic, 0, number, identity):
            return None
        if any(data[_PAGE_TAG_AT - 24 : _PAGE_TAG_AT]):
            return None
        tag = data[_PAGE_TAG_AT:_BODY_AT]
        plain = bytearray(data)
        plain[_PAGE_TAG_AT:_BODY_AT] = bytes(32)
        if not sealer.agrees(plain, tag):
            return None
        return Page(magic, number, generation, data[_BODY_AT:], tag)


@dataclass(frozen=True)
class Header:
    """What the header says; its places follow from it."""

    identity: bytes
    type: ImageType
    block: int
    size: int
    capacity: int
    mark_pages: int
    generation: int = 0
    writable: bool = True
    keyed: bool = False
    root: bytes = bytes(32)

    def next(self, **changed: object) -> Header:
        """Return the header of the next generation."""
        return replace(self, generation=self.generation + 1, **changed)  # type: ignore[arg-type]

    def pack(self, sealer: Sealer) -> bytes:
        """Return the page that holds it."""
        at = places(self)
        page = bytearray(PAGE)
        _HEADER.pack_into(
            page,
            0,
            MAGIC,
            VERSION,
            BYTE_ORDER,
            PAGE,
            self.type,
            self.generation,
            self.identity,
            self.block,
            2 if self.writable else 1,
            _CHECKSUMS[self.keyed],
            self.mark_pages,
            self.size,
            self.capacity,
            at.marks,
            at.roots,
            at.bitmap,
            at.data,
            at.slots,
            self.root,
        )
        page[_TAG_AT:] = sealer.tag(page)
        return bytes(page)

    @staticmethod
    def unpack(data: bytes, sealer: Sealer, path: str) -> Header:
        """Return the header that a page holds.

        Raises FileFormatError for another format, version or byte order, or a key that is missing
        or wrong; DamagedImageError for a checksum that does not agree, or numbers that cannot be.
        """
        if len(data) < PAGE or data[: len(MAGIC)] != MAGIC:
            raise FileFormatError(f"{path}: no GVDK image: it does not begin with {MAGIC!r}")
        fields = _HEADER.unpack_from(data)
        _, version, order, page, kind, generation, identity, block, mode, checksum = fields[:10]
        mark_pages, size, capacity, *begins, root = fields[10:]
        if order != BYTE_ORDER:
            raise FileFormatError(
                f"{path}: byte order mark {order:#010x}, not {BYTE_ORDER:#010x}: its numbers are "
                "not little endian, and no known program writes such images"
            )
        if version != VERSION:
            raise FileFormatError(
                f"{path}: version {version} of the format, and this program reads version "
                f"{VERSION}: update flashwarp"
            )
        if checksum not in _CHECKSUMS.values():
            raise DamagedImageError(f"{path}: header: unknown kind of checksum {checksum}")
        if sealer.keyed != (checksum == _CHECKSUMS[True]):
            needs = (
                "needs its key: give key=" if not sealer.keyed else "has no key: open it without"
            )
            raise FileFormatError(f"{path}: the image {needs}")
        plain = bytearray(data[:PAGE])
        plain[_TAG_AT:] = bytes(32)
        if not sealer.agrees(plain, data[_TAG_AT:PAGE]):
            why = ", or the key is another one" if sealer.keyed else ""
            raise DamagedImageError(f"{path}: header: the checksum does not agree{why}")

        def check(right: bool, what: str) -> None:
            if not right:
                raise DamagedImageError(f"{path}: header: {what}")

        check(page == PAGE, f"pages of {page} bytes, not of {PAGE}")
        check(generation < GENERATION_MAX, f"generation {generation}, which no image lives to see")
        check(kind in tuple(ImageType), f"unknown type {kind}")
        check(mode in (1, 2), f"unknown access mode {mode}")
        check(
            BLOCK_MIN <= block <= BLOCK_MAX and block & (block - 1) == 0,
            f"blocks of {block} bytes, no power of two from {BLOCK_MIN} to {BLOCK_MAX}",
        )
        check(
            0 < capacity <= CAPACITY_MAX and capacity % block == 0,
            f"a capacity of {capacity} bytes, which must be whole blocks up to {CAPACITY_MAX}",
        )
        check(size <= capacity, f"a size of {size} bytes above the capacity, {capacity}")
        check(0 < mark_pages <= MARK_PAGES_MAX, f"{mark_pages} pages of marks")
        check(not any(data[_HEADER.size : _TAG_AT]), "reserved bytes that are not zero")
        header = Header(
            identity, ImageType(kind), block, size, capacity, mark_pages, generation, mode == 2,
            sealer.keyed, root,
        )  # fmt: skip
        at = places(header)
        check(
            begins == [at.marks, at.roots, at.bitmap, at.data, at.slots],
            f"tables at {begins}, where they cannot be",
        )
        return header


class Places(NamedTuple):
    """What follows from a header: where things begin in the file, and how many there are."""

    marks: int  # the dirty bitmap: one page after another
    range_bytes: int  # bytes of data that one mark stands for
    roots: int  # the pages of the L1 table, two copies of each
    root_pages: int
    bitmap: int  # the pages of the bitmap of slots, two copies of each
    bitmap_pages: int
    data: int  # slot 0
    slots: int  # the most slots that the file can have
    table_slots: int  # consecutive slots of an L2 table, which has two copies


def mark_pages(capacity: int, block: int) -> int:
    """Return how many pages of marks a new image has."""
    return min(MARK_PAGES_MAX, max(1, -(-(capacity // block) // BITS)))


def places(header: Header) -> Places:
    """Return what follows from a header whose numbers are possible."""
    blocks = header.capacity // header.block
    range_bytes = header.block
    while header.capacity > range_bytes * BITS * header.mark_pages:
        range_bytes *= 2
    marks = HEADERS * PAGE
    roots = marks + header.mark_pages * PAGE
    root_pages = bitmap_pages = 0
    slots, table_slots = blocks, 0
    if header.type is ImageType.SPARSE:
        tables = -(-blocks // TABLE_ENTRIES)
        table_slots = -(-HEADERS * PAGE // header.block)
        slots = blocks + tables * table_slots
        root_pages = -(-tables // ROOT_ENTRIES)
        bitmap_pages = -(-slots // BITS)
    bitmap = roots + 2 * root_pages * PAGE
    end = bitmap + 2 * bitmap_pages * PAGE
    data = -(-end // header.block) * header.block
    return Places(
        marks, range_bytes, roots, root_pages, bitmap, bitmap_pages, data, slots, table_slots
    )
