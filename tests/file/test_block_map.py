"""Block maps: what the kernel answers is checked, and what it says about devices and files."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import flashwarp as fw
from flashwarp.errors import PathError
from flashwarp.file.block_map import BLOCK_BYTES, FileExtent, read_extents
from flashwarp.file.volume import Volume

MIB = 1 << 20
DEVICE_BYTES = 64 * MIB
LAST = 1


def answer(*extents: tuple[int, int, int, int], count: int | None = None) -> bytes:
    """What the kernel stores: a head, and extents of (logical, physical, nbytes, flags)."""
    count = len(extents) if count is None else count
    head = struct.pack("<QQIIII", 0, 0, 1, count, len(extents), 0)
    return head + b"".join(struct.pack("<QQQ16xI12x", *extent) for extent in extents)


def read(nbytes: int, *answers: bytes) -> tuple[FileExtent, ...]:
    given = iter(answers)
    return read_extents(lambda _start, _length: next(given), "f", nbytes, DEVICE_BYTES)


def test_extents_of_several_answers_follow_one_another() -> None:
    found = read(
        3 * MIB - 5,
        answer((0, MIB, MIB, 0)),
        answer((MIB, 8 * MIB, MIB, 0x1000), (2 * MIB, 4 * MIB, 2 * MIB, LAST)),
    )

    assert found == ((0, MIB, MIB), (MIB, 8 * MIB, MIB), (2 * MIB, 4 * MIB, MIB))


def test_extent_that_begins_before_what_was_asked_for_is_cut() -> None:
    found = read(2 * MIB, answer((0, MIB, MIB, 0)), answer((0, MIB, 2 * MIB, LAST)))

    assert found == ((0, MIB, MIB), (MIB, 2 * MIB, MIB))


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        (0x2, "unknown"), (0x4, "delalloc"), (0x8, "encoded"), (0x80, "encrypted"),
        (0x100, "not aligned"), (0x200, "inline"), (0x400, "tail"), (0x800, "unwritten"),
        (0x2000, "shared"), (0x4000, "flags 0x4000"), (0x80000000, "flags 0x80000000"),
    ],
)  # fmt: skip
def test_every_flag_is_refused_by_name(bit: int, name: str) -> None:
    with pytest.raises(PathError, match=rf"bytes \[0, 1048576\) are {name}"):
        read(MIB, answer((0, MIB, MIB, LAST | bit)))


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ([answer()], r"bytes \[0, 2097152\) are a hole"),
        ([answer((MIB, MIB, MIB, LAST))], r"bytes \[0, 1048576\) are a hole"),
        ([answer((0, MIB, MIB, LAST))], r"bytes \[1048576, 2097152\) are a hole"),
        ([answer((0, MIB, MIB, 0), (0, MIB, MIB, 0))], "what cannot be"),
        ([answer((0, MIB, 0, 0))], "what cannot be"),
        ([answer((0, DEVICE_BYTES - MIB, 2 * MIB, LAST))], "what cannot be"),
        ([answer((0, (1 << 64) - MIB, 2 * MIB, LAST))], "what cannot be"),
        ([answer((0, MIB, MIB, 0), (MIB, MIB + 4096, MIB, LAST))], "overlap"),
        ([answer((0, MIB, 2 * MIB, LAST), count=7)], "7 extents"),
        ([answer((0, MIB + 512, 2 * MIB, LAST))], "whole blocks of 4096"),
    ],
)
def test_answers_that_make_no_map_are_refused(answers: list[bytes], match: str) -> None:
    with pytest.raises(PathError, match=match):
        read(2 * MIB, *answers)


def test_no_answer_leads_out_of_the_device() -> None:
    """Random answers, most of them nearly right: each is refused, or is a map without a fault."""
    seed = random.randrange(1 << 32)
    chooser = random.Random(seed)
    accepted = 0
    for _ in range(20_000):
        nbytes = chooser.randrange(1, 16 * MIB)
        asked: list[int] = []
        ask = _liar(chooser, nbytes, asked)
        try:
            found = read_extents(ask, "f", nbytes, DEVICE_BYTES)
        except PathError:
            continue
        finally:
            assert len(asked) <= 64, f"seed={seed}: it asks without end"
        accepted += 1
        end = 0
        for logical, physical, length in found:
            assert logical == end, f"seed={seed}"
            assert length > 0, f"seed={seed}"
            assert physical % BLOCK_BYTES == 0 == length % BLOCK_BYTES, f"seed={seed}"
            assert 0 <= physical <= DEVICE_BYTES - length, f"seed={seed}"
            end += length
        assert nbytes <= end < nbytes + BLOCK_BYTES, f"seed={seed}"
        places = sorted((physical, physical + length) for _, physical, length in found)
        assert all(a[1] <= b[0] for a, b in pairwise(places)), f"seed={seed}"
    assert accepted > 500, f"seed={seed}: the answers were all wrong"


def _liar(chooser: random.Random, nbytes: int, asked: list[int]) -> Callable[[int, int], bytes]:
    """Answer with extents of random sizes and places, and now and then with a wrong number."""
    share = chooser.choice([0.0, 0.02, 0.3])
    slots = list(range(4))
    chooser.shuffle(slots)

    def ask(start: int, length: int) -> bytes:
        asked.append(start)
        assert 0 < length <= nbytes + BLOCK_BYTES
        extents = []
        at = start
        for _ in range(chooser.randrange(1, 4)):
            slot = slots.pop() if slots else chooser.randrange(4)
            size = chooser.randrange(1, 2048) * BLOCK_BYTES
            fields = [at, slot * 16 * MIB + chooser.randrange(8) * BLOCK_BYTES, size, 0]
            for i in range(4):
                if chooser.random() < share:
                    fields[i] = _wrong(chooser, fields[i], i)
            extents.append(tuple(fields))
            at += size
        count = len(extents)
        if chooser.random() < share:
            count = chooser.randrange(1 << 32)
        return answer(*extents, count=count)  # type: ignore[arg-type]

    return ask


def _wrong(chooser: random.Random, right: int, field: int) -> int:
    if field == 3:
        return 1 << chooser.randrange(32)
    near = right + chooser.choice([-1, 1, 512, -512, BLOCK_BYTES, -BLOCK_BYTES])
    return chooser.choice([near, 0, chooser.randrange(1 << 64), (1 << 64) - BLOCK_BYTES]) % (
        1 << 64
    )


# Devices.


def machine(root: Path, number: str, folder: str, **facts: str) -> None:
    """Lay out a block device in /sys as the kernel does."""
    place = root / "sys/devices/block" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in facts.items():
        (place / name.replace("__", "/")).parent.mkdir(exist_ok=True)
        (place / name.replace("__", "/")).write_text(text + "\n")
    (root / "sys/dev/block").mkdir(parents=True, exist_ok=True)
    (root / "sys/dev/block" / number).symlink_to(place)
    if "/" not in folder:
        (root / "sys/block").mkdir(exist_ok=True)
        (root / "sys/block" / folder).symlink_to(place)


def test_partition_has_its_start_on_the_disk(tmp_path: Path) -> None:
    machine(tmp_path, "259:0", "nvme0n1", size="4096")
    machine(tmp_path, "259:2", "nvme0n1/nvme0n1p2", size="1024", start="2048", partition="2")

    found = Volume.of(os.makedev(259, 2), "f", tmp_path)

    assert found == Volume("nvme0n1p2", 1024 * 512, "nvme0n1", 2048 * 512, 4096 * 512)
    assert found.path == "/dev/nvme0n1p2"
    found.check_plain("f", tmp_path)


def test_partition_beyond_its_disk_is_refused(tmp_path: Path) -> None:
    machine(tmp_path, "259:0", "nvme0n1", size="2100")
    machine(tmp_path, "259:2", "nvme0n1/nvme0n1p2", size="1024", start="2048", partition="2")

    with pytest.raises(PathError, match="partprobe"):
        Volume.of(os.makedev(259, 2), "f", tmp_path)


@pytest.mark.parametrize(
    ("name", "facts", "match"),
    [
        (
            "dm-0",
            {"dm__name": "vg-data", "slaves__nvme0n1": ""},
            r"vg-data\), which is made of nvme",
        ),
        ("md0", {}, "/dev/md0, which is made by"),
    ],
)
def test_disk_made_of_others_is_refused_for_a_namespace(
    tmp_path: Path, name: str, facts: dict[str, str], match: str
) -> None:
    machine(tmp_path, "253:0", name, size="2048", **facts)

    volume = Volume.of(os.makedev(253, 0), "f", tmp_path)

    with pytest.raises(PathError, match=match):
        volume.check_plain("f", tmp_path)


# Files.


def test_file_without_a_device_is_refused(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.major(memory.stat().st_dev) != 0:
        pytest.skip("no tmpfs at /dev/shm")
    path = memory / f"flashwarp-{os.getpid()}"
    path.write_bytes(b"x" * 8192)
    try:
        with pytest.raises(PathError, match="lies on no block device"):
            fw.file.BlockMap.of(path)
    finally:
        path.unlink()


def test_what_is_no_file_with_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, match in (
        (tmp_path / "missing", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "empty", "is empty"),
    ):
        with pytest.raises((PathError, fw.errors.MissingFileError), match=match):
            fw.file.BlockMap.of(path)
