"""Where the bytes of a storage lie on a drive, for the drive's own queue pairs.

Mirrors what `nvme/drive_addressing.cuh` says of extents. Kernels count bytes of the storage, and a
table in device memory tells them the blocks of the drive. The host may end their use at any time,
because a file's blocks may become another file's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from flashwarp import endings
from flashwarp.errors import ArgumentError, StorageError
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.nvme.queue_pair import NamespacePart
from flashwarp.storage import Namespace


class DriveExtents:
    """Extents of a namespace of a drive, and who uses them through queue pairs.

    Any thread may call.

    `parts` are in the order of the storage; without them, the storage is the namespace. Errors call
    it `name`.
    """

    def __init__(
        self, namespace: DriveNamespace, parts: Sequence[NamespacePart] = (), name: str = ""
    ) -> None:
        self.namespace = namespace
        self.parts = _merged(parts)
        self._name = name
        self._lock = endings.Lock()
        self._users: list[Callable[[], None]] = []
        self._ended: Callable[[], StorageError] | None = None

    def check_line(self, line_bytes: int) -> None:
        """Raise ArgumentError if a line would lie in two extents, or be shorter than a block."""
        block = self.namespace.block_bytes
        if line_bytes < block:
            raise ArgumentError(
                f"line={line_bytes}, but the blocks of {self.namespace!r} have {block} bytes: take "
                f"line={block} or more"
            )
        ends = [part.end for part in self.parts[:-1]]
        # The largest power of two that divides all of them.
        common = math.gcd(*ends)
        longest = common & -common
        if not ends or line_bytes <= longest:
            return
        end = next(end for end in ends if end % line_bytes)
        raise ArgumentError(
            f"line={line_bytes}, but an extent of {self._name} ends at its byte {end}, and the "
            f"drive moves a line by one command: take line={longest} or less; or copy the file to "
            "a file system with more room, where its extents are longer"
        )

    def check_end(self, nbytes: int, writable: bool) -> None:
        """Raise ArgumentError if a write of the last line would go past the end of `nbytes`."""
        block = self.namespace.block_bytes
        if writable and nbytes % block:
            raise ArgumentError(
                f"{self._name} has {nbytes} bytes, no multiple of the drive's blocks of {block}, "
                "which kernels write whole: give nbytes= for a part of the file, extend it, or "
                "leave controller= out"
            )

    @contextlib.contextmanager
    def using(self, retire: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Start to use the extents, inside of the ``with``.

        `retire` ends the use: no command is in flight, nor will be, when it returns. `end` calls
        it, in another thread. Yields what is to be called when the use has ended by itself. Raises
        StorageError if `end` was called before.
        """
        with self._lock:
            self._check()
            yield lambda: self._forget(retire)
            self._users.append(retire)

    def end(self, why: Callable[[], StorageError]) -> None:
        """End all use through queue pairs, and refuse more. Blocks for the commands in flight."""
        with self._lock:
            self._ended = why
            users, self._users = self._users, []
            # One that fails keeps no other from its end.
            with contextlib.ExitStack() as all_of_them:
                for retire in users:
                    all_of_them.callback(retire)

    @property
    def ended(self) -> StorageError | None:
        """Why the extents are not used any more."""
        return None if self._ended is None else self._ended()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended()

    def _forget(self, retire: Callable[[], None]) -> None:
        with self._lock:
            if retire in self._users:
                self._users.remove(retire)


class OnDrive:
    """Mixin of storages whose bytes lie in extents of a drive's namespace."""

    drive_extents: DriveExtents | None = None  # none: they lie elsewhere


def on_drive(storage: Namespace) -> DriveExtents | None:
    """Return where a storage lies on a drive; None if it does not."""
    if isinstance(storage, DriveNamespace):
        return DriveExtents(storage, name=storage.path)
    return storage.drive_extents if isinstance(storage, OnDrive) else None


def _merged(parts: Sequence[NamespacePart]) -> tuple[NamespacePart, ...]:
    """Join parts that lie one behind the other, which file systems divide at 128 MiB."""
    merged: list[NamespacePart] = []
    for part in parts:
        if merged and merged[-1].base == part.base:
            merged.pop()
        merged.append(part)
    return tuple(merged)
