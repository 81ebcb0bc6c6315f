"""How ordinary files end: their end and their lock while they are open for writing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from flashwarp import _native
from flashwarp.errors import StorageError
from flashwarp.storage import files


class EndOf:
    """The end and the lock of an ordinary file that is as long as its capacity while it is open.

    It is measured and cut under the lock. What another program appends meanwhile is never cut.
    """

    def __init__(self, path: str, shown: str, lock: bool) -> None:
        files.check(path, writable=True)
        self._path = shown
        self._held: _native.FileStorage | None = files.opened(
            lambda: _native.FileStorage(path, writable=True, lock=lock, name=shown),
            shown,
            writable=True,
        )
        self.descriptor = self._held.fd
        self.same_file = f"/proc/self/fd/{self.descriptor}"
        """Names the file, whatever has its path now."""
        self.size = self.capacity = os.fstat(self.descriptor).st_size
        self.kept = False
        """Whether it stays as it is when the file is closed."""

    def reserve(self, capacity: int, space: bool) -> None:
        """Give the file its length, and if asked for its space; or leave it as it was."""
        try:
            if capacity > self.size:
                os.ftruncate(self.descriptor, capacity)
            if space and capacity:
                os.posix_fallocate(self.descriptor, 0, capacity)
        except OSError as error:
            os.ftruncate(self.descriptor, self.size)
            raise files.write_error(error, self._path) from error
        self.capacity = capacity

    def cut(self) -> None:
        """Let the file end there; raise StorageError if another program has moved its end."""
        if self.kept or self.size == self.capacity:
            return
        now = os.fstat(self.descriptor).st_size
        if now > self.capacity:
            raise StorageError(
                errno.EBUSY,
                f"another program has appended to it, beyond the capacity of {self.capacity} "
                f"bytes: it keeps its {now} bytes, and was not cut to its size of {self.size}",
                self._path,
            )
        if now > self.size:
            os.ftruncate(self.descriptor, self.size)
            os.fsync(self.descriptor)

    def let_go(self) -> None:
        """Give the lock up."""
        if not self.kept:
            self._held = None

    def give_up(self) -> None:
        """End what was kept and could not be attached again."""
        if self.kept:
            self.kept = False
            try:
                self.cut()
            finally:
                self.let_go()


@contextmanager
def drafted(path: files.PathLike, nbytes: int, overwrite: bool) -> Iterator[files.Draft]:
    """Make a file of zeros beside its name; durable."""
    target = files.check_new(files.check_name(path), overwrite)
    with files.Draft(target, overwrite, lock=True) as draft:
        with files.writing(target):
            os.ftruncate(draft.descriptor, nbytes)
            os.fsync(draft.descriptor)
        yield draft
