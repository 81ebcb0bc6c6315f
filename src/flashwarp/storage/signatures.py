"""What a drive carries: a short look for file systems, partition tables and volume managers.

Knows the marks that common tools leave, as blkid does, at the begin and the end of a drive. It
finds reasons not to write; a drive without a mark may still hold data of its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

HEAD_BYTES = 128 << 10
"""Bytes from the begin that hold marks."""
TAIL_BYTES = 128 << 10
"""Bytes before the end that hold marks."""


class _Mark(NamedTuple):
    name: str
    offset: int  # from the begin; if negative, from the end
    magic: bytes


_MARKS = [
    _Mark("a GPT partition table", 512, b"EFI PART"),
    _Mark("a GPT partition table", 4096, b"EFI PART"),
    _Mark("a GPT partition table", -512, b"EFI PART"),
    _Mark("a GPT partition table", -4096, b"EFI PART"),
    _Mark("a partition table or boot sector", 510, b"\x55\xaa"),
    _Mark("ext2, ext3 or ext4", 1024 + 56, b"\x53\xef"),
    _Mark("xfs", 0, b"XFSB"),
    _Mark("btrfs", (64 << 10) + 64, b"_BHRfS_M"),
    _Mark("f2fs", 1024, b"\x10\x20\xf5\xf2"),
    _Mark("bcachefs or bcache", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    _Mark("ntfs", 3, b"NTFS    "),
    _Mark("exfat", 3, b"EXFAT   "),
    _Mark("squashfs", 0, b"hsqs"),
    _Mark("iso9660", (32 << 10) + 1, b"CD001"),
    _Mark("ocfs2", 8192, b"OCFSV2"),
    _Mark("gfs2", 64 << 10, b"\x01\x16\x19\x70"),
    _Mark("swap space", 4096 - 10, b"SWAPSPACE2"),
    _Mark("a LUKS volume", 0, b"LUKS\xba\xbe"),
    _Mark("an md array", 0, b"\xfc\x4e\x2b\xa9"),
    _Mark("an md array", 4096, b"\xfc\x4e\x2b\xa9"),
    _Mark("an md array", -8192, b"\xfc\x4e\x2b\xa9"),
    _Mark("a Ceph OSD", 0, b"bluestore block device"),
    *(_Mark("an LVM physical volume", 512 * n, b"LABELONE") for n in range(4)),
]

# ZFS keeps 128 uberblocks of at least 1 KiB from 128 KiB on, in each of four labels of 256 KiB: two
# at the begin and two at the end. The last 128 KiB are the uberblocks of the last label.
_ZFS = bytes.fromhex("0cb1ba0000000000")
# An md superblock of version 0.90 lies in the last whole 64 KiB but one.
_MD_OLD_UNIT = 64 << 10


def carried_by(read: Callable[[int, int], bytes], nbytes: int) -> list[str]:
    """Return what a drive carries whose bytes `read` returns, from an offset on; see `found_in`."""
    tail_bytes = min(nbytes, TAIL_BYTES)
    head, tail = read(0, min(nbytes, HEAD_BYTES)), read(nbytes - tail_bytes, tail_bytes)
    return found_in(head, tail, nbytes)


def found_in(head: bytes, tail: bytes, nbytes: int) -> list[str]:
    """Return what a drive of `nbytes` bytes carries, for people; empty if nothing is known.

    `head` and `tail` are its first `HEAD_BYTES` and last `TAIL_BYTES`, or all of it if it is
    smaller.
    """
    found = []
    for mark in _MARKS:
        place, data = mark.offset, head
        if place < 0:
            place, data = len(tail) + place, tail
        if place >= 0 and data[place : place + len(mark.magic)] == mark.magic:
            found.append(mark.name)
    old = nbytes // _MD_OLD_UNIT * _MD_OLD_UNIT - _MD_OLD_UNIT - (nbytes - len(tail))
    if old >= 0 and tail[old : old + 4] == b"\xfc\x4e\x2b\xa9":
        found.append("an md array")
    if any(tail[place : place + 8] == _ZFS for place in range(0, len(tail), 1024)):
        found.append("a ZFS pool")
    return list(dict.fromkeys(found))
