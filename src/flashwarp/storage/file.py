"""Files and block devices as storages, and the pages of a file that are read in place."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from flashwarp import _native, config
from flashwarp.config import SIZE_MAX, flag, integer
from flashwarp.errors import (
    ArgumentError,
    PathError,
    StorageError,
)
from flashwarp.storage import files
from flashwarp.storage.base import Storage
from flashwarp.storage.lease import Lease


def _nothing() -> None:
    """Do nothing."""


class Review(Protocol):
    """A review of a file's reads, repeated while it is open; see `file_access.ChoiceReview`."""

    changes: list[str]

    def look(self, file: _native.FileStorage) -> None:
        """Look at the reads, and change between page cache and O_DIRECT if that pays."""


class File(Storage):
    """A byte range of a file.

    Parameters
    ----------
    path : path-like
        An existing regular file or block device.
    offset, nbytes : int, optional
        The range; default the whole file. Bytes past `nbytes` are never written.
    writable : bool
        Open the file for writing too.
    o_direct : bool
        Read and write past the page cache (O_DIRECT), or through it. Any alignment is allowed.
    lock : bool
        Refuse a second writer, in any process, and readers beside a writer in this process. The
        lock ends when this storage and all arrays on it are closed. If False, it checks for no
        other user of the file, no other sees it, and several arrays may store to it.

    Raises
    ------
    MissingFileError, PathError
        If it cannot be opened so.
    LockedError
        If another open file excludes this one; `holder` says in which process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int = 0,
        nbytes: int | None = None,
        *,
        writable: bool = False,
        o_direct: bool = False,
        lock: bool = True,
        _mapping: Mapping | None = None,
        _name: str = "",
        _may_change: bool = False,
        _lease: Lease | None = None,
    ) -> None:
        name = files.check_name(path)
        self._path = _name or name
        status = files.check(name, writable)
        offset = integer("offset", offset, 0, SIZE_MAX)
        if nbytes is not None:
            nbytes = integer("nbytes", nbytes, 1, SIZE_MAX)
        writable, o_direct, lock = (
            flag("writable", writable),
            flag("o_direct", o_direct),
            flag("lock", lock),
        )
        size = status.st_size
        if stat.S_ISREG(status.st_mode):
            wanted = size - offset if nbytes is None else nbytes
            if wanted < 0 or offset + wanted > size:
                raise ArgumentError(
                    f"bytes [{offset}, {offset + wanted}) of {self._path}: it has {size} bytes"
                )
        self._refuses = lock
        self.offset = offset
        self.o_direct = o_direct
        self.mapping = _mapping
        self.review: Review | None = None
        """Changes between page cache and O_DIRECT, if the file may change."""
        self.lease = _lease
        self.lease_refusal = ""
        self.release_pinned: Callable[[], None] = _nothing
        """Ends the counting of its pages as pinned; may be called twice."""
        # A file that is read in place needs a window only for the time after its lease.
        copies = bool(config.current().copy_cached) and (_mapping is None or _lease is not None)
        native = files.opened(
            lambda: _native.FileStorage(
                name,
                offset,
                nbytes or 0,
                writable,
                "direct" if o_direct else "buffered",
                0 if _mapping is None else _mapping.origin,
                copies,
                lock,
                _name,
                _may_change,
            ),
            self._path,
            writable=writable,
        )
        status = os.fstat(native.fd)
        self.identity = status.st_dev, status.st_ino
        """Device and inode of the open file; its path may name another file by now."""
        # Valid after a change of the working directory.
        self._absolute = Path(self._path).absolute()
        super().__init__(native)

    @property
    def path(self) -> str:
        """The file as it was named."""
        return self._path

    @property
    def native(self) -> _native.FileStorage:
        """The C++ storage, for the controller; ClosedError after `close`."""
        return cast("_native.FileStorage", super().native)

    @property
    def disks(self) -> frozenset[int]:
        """Device number of its disk, if it is read past the page cache now."""
        return frozenset({self.identity[0]} if self._native.o_direct else ())

    def check_unchanged(self) -> None:
        """Raise StorageError when the file was cut short, replaced or removed."""
        end = self.offset + self.nbytes
        size = os.lseek(self._native.fd, 0, os.SEEK_END)  # an array goes on after `close`
        if size < end:
            raise StorageError(
                errno.ENODATA,
                f"truncated: the file has {size} bytes, and had at least {end} when it was opened",
                self._path,
                offset=size,
            )
        try:
            status = os.stat(self._absolute)
        except OSError:
            how = "removed"
        else:
            how = "" if (status.st_dev, status.st_ino) == self.identity else "replaced"
        if how:
            raise StorageError(
                errno.ESTALE,
                f"the file was {how} since it was opened: what is read is what it was, and what is "
                "written is lost; open it again",
                self._path,
            )

    def look_again(self) -> None:
        """Change to the page cache or to O_DIRECT, if `o_direct=` was not given and it pays.

        Costs 0.2 us, and 50 us each time that `Config.review_bytes` were read.
        """
        if self.review is not None:
            self.review.look(self._native)  # an array goes on after `close`

    def leave_pages(self) -> None:
        """Give up its lease and its share of pinned memory: no device reads it in place.

        Otherwise a writer would wait for the lease. May be called twice.
        """
        if self.lease is not None:
            self.lease.close()
        self.release_pinned()

    def describe(self) -> dict[str, Any]:
        """Return facts for people, as `Storage.describe`; ``changed`` lists other choices."""
        facts = super().describe()
        if self.review is not None and self.review.changes:
            facts["changed"] = "; ".join(self.review.changes)
        return facts


class BlockDevice(File):
    """A block device, whole or in part, read and written past the page cache.

    Parameters
    ----------
    path : path-like
        Such as ``/dev/nvme0n1p2``. The process needs permission to open it.
    offset, nbytes, writable, lock
        As for `File`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int = 0,
        nbytes: int | None = None,
        *,
        writable: bool = False,
        lock: bool = True,
    ) -> None:
        name = files.check_name(path)
        status = files.check(name, writable)
        if not stat.S_ISBLK(status.st_mode):
            raise PathError(errno.ENOTBLK, "is not a block device: use storage.File", name)
        super().__init__(path, offset, nbytes, writable=writable, o_direct=True, lock=lock)


class Mapping:
    """A file's pages, mapped read-only, which a GPU reads in place.

    Maps bytes [begin, end) of the file, and what lies before them on their first page.
    """

    def __init__(self, path: Path, end: int, begin: int = 0) -> None:
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        self.nbytes = end - start
        self._start = start
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            status = os.fstat(self._fd)
            self.identity = status.st_dev, status.st_ino
            self._map = mmap.mmap(
                self._fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start
            )
        except BaseException:
            self._close_fd()
            raise
        self._view = np.frombuffer(self._map, np.uint8)
        self.address = int(self._view.ctypes.data)
        self.origin = (self.address - start) % (1 << 64)  # as the extension adds
        """Where byte 0 of the file would lie."""
        self.pages = (*self.identity, start)
        """What names its pages: device, inode, and the first byte in the file."""
        self.asked_by = "cachestat"
        """How `residency` learns which pages are in the page cache."""

    def residency(self, begin: int = 0, end: int | None = None) -> float:
        """Share of its pages that are in the page cache now, or of those of bytes [begin, end).

        Asks by cachestat. If the kernel does not have it or refuses it, asks by mincore, which
        takes several times as long; `asked_by` says so.

        Raises
        ------
        OSError
            If a sandbox refuses mincore, too.
        """
        end = self.nbytes if end is None else end
        if self.asked_by == "cachestat" and begin < end:
            first = begin - begin % mmap.PAGESIZE
            pages = -(-(end - first) // mmap.PAGESIZE)
            try:
                cached = _native.cached_pages(self._fd, self._start + first, pages * mmap.PAGESIZE)
            except OSError as error:
                self.asked_by = f"mincore, because cachestat failed: {error.strerror}"
            else:
                return cached / pages
        return float(_native.residency(self.address + begin, end - begin))

    def leave(self) -> None:
        """Replace the file's pages by zeros, so that no thread dies of SIGBUS if the file is cut.

        Only for pages that no device has registered. A thread that reads at the same time must
        check afterwards whether they were replaced.
        """
        _native.replace_mapping(self.address, self.nbytes)

    def close(self) -> None:
        """Unmap it. No thread or device may use its address any more. May be called twice."""
        if not self._map.closed:
            del self._view
            self._map.close()
            self._close_fd()
