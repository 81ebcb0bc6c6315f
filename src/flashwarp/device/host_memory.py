"""How much host memory this process may still use.

The machine is one limit, and each control group of the process is another; the least counts. The
page cache counts as available, because the kernel reclaims it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flashwarp import endings

# Names of the files of a memory control group: limit, use, and the lines of `memory.stat` for what
# can be reclaimed. Version 1 counts the groups below in the lines with `total_`.
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


class PinnedFiles:
    """How many bytes of the page cache the arrays of a process may have pinned, all together.

    Pinned pages of files count as available memory, so no look at the memory shows them. Arrays on
    the same bytes of a file pin the same pages, which count once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = endings.Lock()
        self._sizes: dict[tuple[int, ...], list[int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are counted now."""
        with self._lock:
            return self._sum()

    def reserve(
        self, file: tuple[int, ...], nbytes: int, most: int
    ) -> tuple[Callable[[], None] | None, int]:
        """Count `nbytes` of a file, if all together are at most `most`.

        `file` is its device and inode, and the byte at which they begin. Returns what ends it,
        which may be called twice, or None if they would be more, so that they are not counted; and
        the bytes that were counted before.
        """
        with self._lock:
            others = self._sum()
            sizes = self._sizes.setdefault(file, [])
            sizes.append(nbytes)
            if self._sum() > most:
                self._remove(file, nbytes)
                return None, others
        held = [nbytes]

        def release() -> None:
            with self._lock:
                if held:
                    self._remove(file, held.pop())

        return release, others

    def _sum(self) -> int:
        return sum(max(sizes) for sizes in self._sizes.values())

    def _remove(self, file: tuple[int, ...], nbytes: int) -> None:
        self._sizes[file].remove(nbytes)
        if not self._sizes[file]:
            del self._sizes[file]


pinned_files = PinnedFiles()
"""Of this process."""


def total_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return bytes that can be used without swapping, page cache included.

    The least of the machine's ``MemAvailable`` and of what each control group leaves. `proc` and
    `groups` are where the file systems of the kernel are mounted.
    """
    available = [_machine(proc), *_left_in_groups(proc, groups)]
    return max(0, min(available))


def _machine(proc: Path) -> int:
    try:
        with (proc / "meminfo").open() as file:
            fields = dict(line.split(":", 1) for line in file)
        # "MemAvailable:   123456 kB"
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):  # no /proc here, or a kernel before 3.14: free memory alone
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yield what the group of this process leaves, and each group above it."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, name = entry.split(":", 2)
        # Version 2 is one tree, mounted as such or beside those of version 1, without memory then.
        roots = {"": groups, "memory": groups / "memory"}
        if controllers not in roots:
            continue
        names = _V1 if controllers else _V2
        root = roots[controllers]
        # Inside a container the path may be the host's, and only the root may exist.
        inner = root / name.lstrip("/")
        for group in (inner, *inner.parents):
            if group == root.parent:
                break
            left = _left(group, *names)
            if left is not None:
                yield left


def _left(group: Path, limit: str, used: str, reclaimable: tuple[str, ...]) -> int | None:
    """Return what a group leaves; None if it has no limit or cannot be read."""
    try:
        most = (group / limit).read_text().strip()
        if most == "max":
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = int(most) - int((group / used).read_text())
        return free + sum(int(stat.get(name, 0)) for name in reclaimable)
    except (OSError, ValueError):
        return None
