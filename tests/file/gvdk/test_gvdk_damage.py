"""A damaged or forged image is refused with its reason, or holds what it held; repair mends it.

The fuzzer changes header, tables and length. What it changes keeps its old checksum, which finds
accidents, or gets a new one, as a forger without a key can make it.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from flashwarp.errors import FileFormatError, FlashwarpError, StorageError
from flashwarp.file.gvdk import DamagedImageError, Gvdk
from flashwarp.file.gvdk.inspecting import newest_header
from flashwarp.file.gvdk.layout import PAGE, Header, Places, Sealer, places
from flashwarp.file.gvdk.tables import Disk

IMAGES = int(os.environ.get("FLASHWARP_IMAGE_FUZZ", "400"))
SEED = int(os.environ.get("FLASHWARP_IMAGE_SEED", "1"))
CAPACITY = 3 << 20  # two L2 tables
KEY = b"k" * 32
DATA = bytes(random.Random(0).randbytes(50_000))
PIECES = (0, 1_000_000, 2_500_000)


def make(path: Path, preallocate: bool, key: bytes | None) -> None:
    with Gvdk.create(path, CAPACITY, preallocate=preallocate, key=key) as image:
        for place in PIECES:
            image.write(place, DATA[:20_000])
            image.flush()
        for place in PIECES:
            image.write(place, DATA)


def holds(image: Gvdk) -> bool:
    """Whether an image has what `make` wrote."""
    content = bytearray(CAPACITY)
    for place in PIECES:
        content[place : place + len(DATA)] = DATA
    return image.size == CAPACITY and image.read(0, CAPACITY) == content


def header_of(path: Path, key: bytes | None = None) -> tuple[Header, Places]:
    with path.open("rb") as file:
        header, _ = newest_header(Disk(file.fileno()), Sealer(key), str(path))
    return header, places(header)


def reseal(content: bytearray, page: int) -> None:
    """Give a page the checksum that it needs, as anybody can who has no key."""
    begin, end = page * PAGE, (page + 1) * PAGE
    tag = end - 32 if page < 2 else begin + 64
    content[tag : tag + 32] = bytes(32)
    content[tag : tag + 32] = Sealer(None).tag(content[begin:end])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], bytes]:
    folder = tmp_path_factory.mktemp("images")
    found = {}
    for preallocate in (True, False):
        for keyed in (False, True):
            path = folder / f"{preallocate}{keyed}"
            make(path, preallocate, KEY if keyed else None)
            found[preallocate, keyed] = path.read_bytes()
    return found


def meta_pages(content: bytes, path: Path, key: bytes | None) -> list[int]:
    """The pages of an image that hold something else than its data."""
    path.write_bytes(content)
    _, at = header_of(path, key)
    pages = [page for page in range(at.data // PAGE) if any(content[page * PAGE :][:PAGE])]
    tables = [
        page
        for page in range(at.data // PAGE, len(content) // PAGE)
        if content[page * PAGE :][:4] == b"GVL2"
    ]
    return pages + tables


def mutate(content: bytearray, pages: list[int], chooser: random.Random, forged: bool) -> None:
    """Change one to three things."""
    for _ in range(chooser.randrange(1, 4)):
        page = chooser.choice(pages)
        begin = page * PAGE
        kind = chooser.randrange(8)
        if kind < 3:
            place = begin + chooser.randrange(PAGE)
            content[place] ^= 1 << chooser.randrange(8)
        elif kind < 5:
            # Numbers at the begin of a page, and entries of tables.
            place = begin + chooser.choice(
                [8 * chooser.randrange(20), 96 + 8 * chooser.randrange(8)]
            )
            number = chooser.choice(
                [0, 1, 2, 5, 255, 4095, 1 << 20, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
            )
            content[place : place + 8] = struct.pack("<Q", number)
        elif kind == 5:
            other = chooser.choice(pages) * PAGE
            content[begin : begin + PAGE] = content[other : other + PAGE]
        elif kind == 6:
            content[begin : begin + PAGE] = bytes(PAGE)
        else:
            del content[chooser.randrange(len(content)) :]
            return
        if forged:
            reseal(content, page)


@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("preallocate", [True, False])
def test_no_damage_gives_wrong_bytes_or_ends_the_process(
    preallocate: bool,
    keyed: bool,
    forged: bool,
    images: dict[tuple[bool, bool], bytes],
    tmp_path: Path,
) -> None:
    key = KEY if keyed else None
    original = images[preallocate, keyed]
    path = tmp_path / "image.gvdk"
    pages = meta_pages(original, path, key)
    chooser = random.Random(SEED * 8 + preallocate * 4 + keyed * 2 + forged)
    refused = 0
    for _ in range(IMAGES // 8):
        content = bytearray(original)
        mutate(content, pages, chooser, forged)
        path.write_bytes(content)
        try:
            with Gvdk(path, key=key) as image:
                same = holds_or_fails(image)
            # Without a key, a forger may say whatever a writer could have said.
            assert same or (forged and not keyed)
        except (FileFormatError, StorageError):
            refused += 1
        mend(path, key)
    print(f"{refused} of {IMAGES // 8} damaged images were refused")
    assert refused >= IMAGES // 80


def holds_or_fails(image: Gvdk) -> bool:
    if image.capacity > 64 << 20:
        image.read(image.capacity - 10, 10)
        return False
    image.read(0, image.capacity)
    return holds(image)


def mend(path: Path, key: bytes | None) -> None:
    """After a repair, an image opens, is clean, and takes writes, or it has no header left."""
    try:
        Gvdk.repair(path, key=key)
    except FlashwarpError:
        with pytest.raises(FlashwarpError):
            Gvdk(path, writable=True, key=key)
        return
    if path.stat().st_size > 64 << 20:
        return
    with Gvdk(path, writable=True, key=key) as image:
        assert image.verify().clean
        image.write(0, b"mended")
    with Gvdk(path, key=key) as image:
        assert image.read(0, 6) == b"mended"


def patch(path: Path, offset: int, data: bytes, *, resealed: bool = False) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    if resealed:
        reseal(content, offset // PAGE)
    path.write_bytes(content)


HEADERS_WITH = {
    "magic": (0, b"GVDK\n", "no GVDK image"),
    "version": (8, struct.pack("<I", 2), "version 2 of the format"),
    "byte order": (12, struct.pack(">I", 0x01020304), "byte order mark 0x04030201"),
    "page": (16, struct.pack("<I", 512), "pages of 512 bytes"),
    "type": (20, struct.pack("<I", 9), "unknown type 9"),
    "generation": (24, struct.pack("<Q", (1 << 64) - 1), "no image lives to see"),
    "block": (48, struct.pack("<I", 5000), "blocks of 5000 bytes"),
    "mode": (52, struct.pack("<I", 7), "unknown access mode 7"),
    "checksum kind": (56, struct.pack("<I", 3), "unknown kind of checksum 3"),
    "marks": (60, struct.pack("<I", 65), "65 pages of marks"),
    "size": (64, struct.pack("<Q", CAPACITY + 1), "above the capacity"),
    "capacity": (72, struct.pack("<Q", 1 << 45), "a capacity of 35184372088832 bytes"),
    "overflow": (72, struct.pack("<Q", (1 << 64) - 4096), "a capacity of 18446744073709547520"),
    "places": (80, struct.pack("<Q", 4096), "tables at"),
    "reserved": (2000, b"\1", "reserved bytes that are not zero"),
}


@pytest.mark.parametrize("what", HEADERS_WITH)
def test_a_wrong_header_is_refused_by_name(what: str, tmp_path: Path) -> None:
    offset, data, why = HEADERS_WITH[what]
    path = tmp_path / "image.gvdk"
    make(path, False, None)
    for copy in (0, PAGE):
        patch(path, copy + offset, data, resealed=True)
    with pytest.raises(FileFormatError, match=why) as raised:
        Gvdk(path)
    assert str(path) in str(raised.value)


def test_one_header_copy_is_enough(tmp_path: Path) -> None:
    for copy in (0, PAGE):
        path = tmp_path / f"{copy}.gvdk"
        make(path, False, None)
        patch(path, copy + 64, b"\xff")
        with Gvdk(path) as image:
            assert holds(image)
            assert any("header" in problem for problem in image.verify().problems)
        assert not Gvdk.repair(path).clean
        with Gvdk(path) as image:
            assert image.verify().clean


def damage_of_page(
    magic: bytes, change: Callable[[bytearray, int], None]
) -> Callable[[Path], None]:
    """Change the newest copies of a table, and give them right checksums."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        pages = [p for p in range(len(content) // PAGE) if content[p * PAGE :][:4] == magic]
        for page in pages:
            change(content, page * PAGE)
            reseal(content, page)
        path.write_bytes(content)

    return damage


def put(offset: int, value: int) -> Callable[[bytearray, int], None]:
    def change(content: bytearray, begin: int) -> None:
        content[begin + offset : begin + offset + 8] = struct.pack("<Q", value)

    return change


def copy_entry(content: bytearray, begin: int) -> None:
    content[begin + 104 : begin + 112] = content[begin + 96 : begin + 104]


@pytest.mark.parametrize(
    ("magic", "change", "why"),
    [
        (b"GVL1", put(96, 1 << 40), "not those of the header"),
        (b"GVL2", put(96, 1 << 40), "names slot"),
        (b"GVL2", put(96, 700), "cut short"),
        (b"GVL2", copy_entry, "which is in use"),
        (b"GVBM", put(96, 0), "not those of the header"),
    ],
)
def test_tables_that_cross_or_leave_the_file_are_refused(
    magic: bytes, change: Callable[[bytearray, int], None], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "image.gvdk"
    make(path, False, None)
    damage_of_page(magic, change)(path)
    with pytest.raises(DamagedImageError, match=why):
        Gvdk(path)
    report = Gvdk.repair(path)
    assert not report.clean
    with Gvdk(path) as image:
        assert image.verify().clean
        content = image.read(0, CAPACITY)
    for place in PIECES:
        for begin in range(place // 4096 * 4096, place + len(DATA), 4096):
            lost = any(first <= begin < end for first, end in report.lost)
            expected = bytearray(4096)
            for other in PIECES:
                low, high = max(begin, other), min(begin + 4096, other + len(DATA))
                expected[max(0, low - begin) : max(0, high - begin)] = DATA[
                    max(0, low - other) : max(0, high - other)
                ]
            assert lost or content[begin : begin + 4096] == expected


def test_a_page_of_an_earlier_time_is_found(tmp_path: Path) -> None:
    # Its own checksum agrees, with a key, too.
    path = tmp_path / "image.gvdk"
    make(path, False, KEY)
    content = bytearray(path.read_bytes())
    tables = [p for p in range(len(content) // PAGE) if content[p * PAGE :][:4] == b"GVL2"]
    newest = max(tables, key=lambda p: content[p * PAGE + 16 : p * PAGE + 24][::-1])
    other = next(p for p in tables if abs(p - newest) == 1)
    content[newest * PAGE : (newest + 1) * PAGE] = content[other * PAGE : (other + 1) * PAGE]
    path.write_bytes(content)
    with pytest.raises(DamagedImageError, match="is not what was written"):
        Gvdk(path, key=KEY)


@pytest.mark.parametrize("preallocate", [True, False])
def test_a_file_that_was_cut_short_is_refused(preallocate: bool, tmp_path: Path) -> None:
    path = tmp_path / "image.gvdk"
    make(path, preallocate, None)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(DamagedImageError, match="cut short"):
        Gvdk(path)
    assert Gvdk.repair(path).lost
    with Gvdk(path) as image:
        assert image.verify().clean


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"GVDK", b"\x93NUMPY" + bytes(10_000)):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="no GVDK image"):
            Gvdk(path)
        with pytest.raises(FileFormatError):
            Gvdk.repair(path)
