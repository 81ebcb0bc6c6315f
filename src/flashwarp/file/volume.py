"""The block device that a file lies on, and where its bytes lie on the whole drive.

The facts come from /proc and /sys. Only file systems whose files keep their blocks are accepted:
others move them by themselves, or have addresses that are no places on a device.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from flashwarp.errors import PathError
from flashwarp.storage.block_users import names_in, text_of

_SECTOR_BYTES = 512

# File systems that change a block in place, and move it for nobody who has not opened the file.
_STEADY = {"ext2", "ext3", "ext4", "xfs"}

_COPY = "copy the file to an ext4 or xfs file system, or open it by its name, through Linux"

# linux/fs.h: _IOR('f', 1, long), _IOR('X', 31, struct fsxattr).
_GET_FLAGS, _GET_XATTR = 0x80086601, 0x801C581F
_FLAG_REFUSALS = {
    0x00000004: "it is compressed (chattr -c)",
    0x00000800: "it is encrypted",
    0x00004000: "its data goes through the journal (chattr -j)",
    0x10000000: "its data lies in the inode",
}
_REALTIME = 0x1


@dataclass(frozen=True)
class Volume:
    """A block device with a file system."""

    name: str  # in /sys/block, or below; such as "nvme0n1p2"
    nbytes: int  # its size
    disk: str  # the device that it is a partition of; itself, if it is none
    start: int  # byte of the disk at which it begins
    disk_nbytes: int  # size of the disk

    @property
    def path(self) -> str:
        """Such as "/dev/nvme0n1p2"."""
        return _node(self.name)

    @classmethod
    def of(cls, device: int, path: str, root: Path = Path("/")) -> Volume:
        """Return the volume with a device number, which a file at `path` has as its st_dev.

        Raises PathError if no block device has the number: the file system is in memory, remote, or
        spans several devices.
        """
        number = f"{os.major(device)}:{os.minor(device)}"
        folder = (root / "sys/dev/block" / number).resolve()
        if os.major(device) == 0 or not (folder / "size").is_file():
            raise PathError(
                errno.ENOTBLK,
                f"lies on no block device (its device number is {number}), as on tmpfs, btrfs, "
                f"overlay or network file systems: {_COPY}",
                path,
            )
        size = _number(folder / "size") * _SECTOR_BYTES
        if not (folder / "partition").is_file():
            return cls(folder.name, size, folder.name, 0, size)
        start = _number(folder / "start") * _SECTOR_BYTES
        disk_bytes = _number(folder.parent / "size") * _SECTOR_BYTES
        if start + size > disk_bytes:
            raise PathError(
                errno.EIO,
                f"lies on {folder.name}, whose bytes [{start}, {start + size}) are beyond the "
                f"{disk_bytes} of {folder.parent.name}: run partprobe",
                path,
            )
        return cls(folder.name, size, folder.parent.name, start, disk_bytes)

    def check_plain(self, path: str, root: Path = Path("/")) -> None:
        """Raise PathError if the disk is made of others: its bytes have other places on these."""
        parts = sorted(names_in(root / "sys/block" / self.disk / "slaves"))
        kind = text_of(root / "sys/block" / self.disk / "dm/name")
        if parts or kind or self.disk.startswith("md"):
            of = f" of {', '.join(parts)}" if parts else ""
            raise PathError(
                errno.ENOTBLK,
                f"lies on {self.path}{f' ({kind})' if kind else ''}, which is made{of} by the "
                "kernel's device mapper or RAID, so that its blocks have other places on a drive: "
                "use the file's map without a namespace, or a file system on a plain partition",
                path,
            )


def check_file_system(descriptor: int, path: str) -> str:
    """Return the kind of the file system of an open file.

    Raises PathError if a file there may not be used by its blocks.
    """
    kind, options = _mount_of(descriptor)
    if kind not in _STEADY:
        raise PathError(
            errno.EOPNOTSUPP,
            f"lies on {kind or 'an unknown file system'}, and only on "
            f"{', '.join(sorted(_STEADY))} do files keep their blocks: {_COPY}",
            path,
        )
    refusals = [why for bit, why in _FLAG_REFUSALS.items() if _flags(descriptor) & bit]
    if "data=journal" in options:
        refusals.append("its data goes through the journal (mount with data=ordered)")
    if kind == "xfs" and _is_realtime(descriptor):
        refusals.append("it lies on the realtime device of its file system")
    if refusals:
        raise PathError(
            errno.EOPNOTSUPP, f"has no blocks of its own: {'; '.join(refusals)}; or {_COPY}", path
        )
    return kind


def _mount_of(descriptor: int) -> tuple[str, list[str]]:
    """Return file system and options of the mount that an open file was found through."""
    facts = text_of(Path(f"/proc/self/fdinfo/{descriptor}")).split()
    if "mnt_id:" not in facts:
        return "", []
    mount = facts[facts.index("mnt_id:") + 1]
    for line in text_of(Path("/proc/self/mountinfo")).splitlines():
        # "36 35 259:1 / /mount/point rw,noatime shared:1 - ext4 /dev/nvme0n1p1 rw,data=journal"
        before, _, after = line.partition(" - ")
        if before.split()[:1] == [mount]:
            kind, _, options = after.partition(" ")
            return kind, options.split()[-1].split(",")
    return "", []


def _flags(descriptor: int) -> int:
    return int(struct.unpack_from("<i", _asked(descriptor, _GET_FLAGS, 8))[0]) & 0xFFFFFFFF


def _is_realtime(descriptor: int) -> bool:
    (flags,) = struct.unpack_from("<I", _asked(descriptor, _GET_XATTR, 28))
    return bool(flags & _REALTIME)


def _asked(descriptor: int, request: int, nbytes: int) -> bytes:
    answer = bytearray(nbytes)
    fcntl.ioctl(descriptor, request, answer)
    return bytes(answer)


def _node(name: str) -> str:
    # The kernel writes "!" in /sys for what is "/" in /dev.
    return f"/dev/{name.replace('!', '/')}"


def _number(path: Path) -> int:
    return int(text_of(path) or 0)
