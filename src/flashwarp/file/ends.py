"""How files end: what one holds while it is open, and the end and lock of an ordinary file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from flashwarp import _native, endings
from flashwarp.errors import StorageError
from flashwarp.file.kernel_file import read_size
from flashwarp.storage import files

if TYPE_CHECKING:
    from flashwarp.file.file import File

__all__ = ["EndOf", "Opened", "drafted"]


class Opened:
    """What a file holds until its end, which the registry of `endings` may be the one to see."""

    def __init__(self, file: File, held: ExitStack) -> None:
        self.device = file.device
        self.closed = False
        self._array, self._state, self._image = file.array, file._state, file.image
        self._end_of = file._end_of
        self._writable = file.writable
        self._held = held
        self._pid = os.getpid()
        endings.remember(self)

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child of the one that opened the file."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Give the file its size, and release everything. May be called twice."""
        if self.closed:
            return
        self.closed = True
        endings.forget(self)
        if self.in_child:
            return
        with self._held:
            if self._writable and not self._array.closed:
                try:
                    self._array.synchronize()
                finally:
                    size = read_size(self.device, self._state)
                    if self._end_of is not None:
                        self._end_of.size = size
                    if self._image is not None:
                        self._image.note_size(size)


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
        try:
            os.ftruncate(draft.descriptor, nbytes)
            os.fsync(draft.descriptor)
        except OSError as error:
            raise files.write_error(error, target) from error
        yield draft
