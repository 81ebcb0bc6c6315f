"""Formats that a drive carries are known by what the tools themselves write."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from flashwarp.storage import signatures

MIB = 1 << 20


def found(path: Path) -> list[str]:
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(signatures.HEAD_BYTES)
        file.seek(nbytes - signatures.TAIL_BYTES)
        return signatures.found_in(head, file.read(), nbytes)


def image(folder: Path, nbytes: int = 512 * MIB) -> Path:
    path = folder / "drive"
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("mkfs.ext4 -q -F", "ext2, ext3 or ext4"),
        ("mkfs.xfs -q -f", "xfs"),
        ("mkswap -q", "swap space"),
        ("mkfs.btrfs -q -f", "btrfs"),
    ],
)
def test_file_systems_are_known(tmp_path: Path, command: str, name: str) -> None:
    tool, *options = command.split()
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    path = image(tmp_path)
    assert found(path) == []
    subprocess.run([tool, *options, str(path)], check=True, stdout=subprocess.DEVNULL)
    assert found(path) == [name]


def test_partition_tables_are_known(tmp_path: Path) -> None:
    if shutil.which("sfdisk") is None:
        pytest.skip("sfdisk is not installed")
    path = image(tmp_path, 8 * MIB)
    subprocess.run(["sfdisk", "-q", str(path)], input="label: gpt\n,\n", text=True, check=True)
    assert found(path) == ["a GPT partition table", "a partition table or boot sector"]
    # Its second copy is at the end, and is found when the first was overwritten.
    with path.open("r+b") as file:
        file.write(bytes(MIB))
    assert found(path) == ["a GPT partition table"]


def test_marks_at_the_end_are_known() -> None:
    head = bytes(signatures.HEAD_BYTES)
    nbytes = 10 * MIB + 4096
    old_md = nbytes // 65536 * 65536 - 65536
    for place, mark, name in (
        (nbytes - 8192, b"\xfc\x4e\x2b\xa9", "an md array"),
        (old_md, b"\xfc\x4e\x2b\xa9", "an md array"),
        (nbytes - 65536, struct.pack("<Q", 0x00BAB10C), "a ZFS pool"),
    ):
        tail = bytearray(signatures.TAIL_BYTES)
        at = place - (nbytes - len(tail))
        tail[at : at + len(mark)] = mark
        assert signatures.found_in(head, bytes(tail), nbytes) == [name]


def test_data_and_small_drives_carry_nothing() -> None:
    for nbytes in (0, 512, 4096, MIB):
        data = os.urandom(nbytes).replace(b"\x55\xaa", b"\x55\x00")
        head, tail = data[: signatures.HEAD_BYTES], data[-signatures.TAIL_BYTES :]
        assert signatures.found_in(head, tail, nbytes) == []
