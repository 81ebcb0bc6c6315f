"""Who uses a block device through the kernel: reasons not to write to it past the kernel.

The facts come from /sys and /proc. A user sees the processes that are his own; root sees all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def users_of(disk: str, root: Path = Path("/")) -> list[str]:
    """Return who uses a block device such as "nvme0n1", or a part of it, for people.

    `root` is what lies at "/" on the machine.
    """
    block = root / "sys/block" / disk
    parts = [disk, *(each for each in names_in(block) if each.startswith(disk))]
    found = [user for part in parts for user in _users_of_part(part, disk, root)]
    if not found:
        found = [
            f"the kernel has claimed /dev/{part}: it is mounted, perhaps in a container, or part "
            f"of another device (lsblk /dev/{part})"
            for part in parts
            if _is_claimed(root / "dev" / part)
        ]
    names = {f"/dev/{part}" for part in parts} | {f"/dev/ng{disk.removeprefix('nvme')}"}
    for process in processes_with(root, names.__contains__):
        found.append(f"process {process} has /dev/{disk} open (ps {process})")
    return found


def _users_of_part(part: str, disk: str, root: Path) -> Iterator[str]:
    folder = root / "sys/block" / disk / ("" if part == disk else part)
    number = text_of(folder / "dev")
    for mounted in _mounts(number, root):
        yield f"/dev/{part} is mounted on {mounted} (sudo umount {mounted})"
    for holder in names_in(folder / "holders"):
        yield f"/dev/{part} is part of /dev/{holder} (lsblk /dev/{holder})"
    swaps = text_of(root / "proc/swaps").splitlines()[1:]
    if any(line.split()[:1] == [f"/dev/{part}"] for line in swaps):
        yield f"/dev/{part} is swap space (sudo swapoff /dev/{part})"


def _is_claimed(device: Path) -> bool:
    """Whether the kernel has a block device for itself, in whichever namespace of mounts."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def _mounts(number: str, root: Path) -> Iterator[str]:
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        # "36 35 259:1 / /mount/point rw,noatime - ext4 /dev/nvme0n1p1 rw"
        fields = line.split()
        if len(fields) > 4 and number and fields[2] == number:
            yield fields[4].replace(r"\040", " ")


def processes_with(root: Path, fits: Callable[[str], bool]) -> Iterator[int]:
    """Yield the processes that have a file open whose name fits, as far as this user may look."""
    for name in names_in(root / "proc"):
        if not name.isdigit():
            continue
        folder = root / "proc" / name / "fd"
        for descriptor in names_in(folder):
            try:
                target = os.readlink(folder / descriptor)
            except OSError:  # closed meanwhile
                continue
            if fits(target):
                yield int(name)
                break


# Facts of the kernel, which may be gone, or hidden from this user.


def text_of(path: Path) -> str:
    """Return the text of a small file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def names_in(folder: Path) -> list[str]:
    """Return what a folder has, in order; nothing if there is none."""
    try:
        return sorted(each.name for each in folder.iterdir())
    except OSError:
        return []
