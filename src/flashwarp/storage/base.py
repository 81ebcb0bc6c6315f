"""What holds the bytes of an array: host memory, a file, a block device, or several of these.

A storage knows bytes, not arrays. Its namespace has logical blocks of 512 bytes, from byte 0 on. It
handles the alignment that O_DIRECT requires. Storages are thread-safe. The caller that opens a
storage owns it, and a controller keeps its storage alive.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, cast

from flashwarp import _native
from flashwarp.config import SIZE_MAX, flag, integer
from flashwarp.endings import Closing
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DeviceOutOfMemory,
    FlashwarpError,
    ForkError,
    ReadOnlyError,
    StorageError,
)


class Namespace(Closing):
    """A description of what an array lies on: its size, and whether it takes writes.

    The array's controller finds the bytes. A namespace alone is for your own controller, if the
    bytes are in no file and no memory. The software controller needs a `Storage`.

    Parameters
    ----------
    nbytes : int
        Size of the namespace in bytes. Arrays address it in logical blocks of `lba_bytes`.
    writable : bool
        Whether it takes writes.
    path : str, optional
        What errors and descriptions call it.

    Notes
    -----
    Any number of threads may call at the same time.
    """

    lba_bytes = 512
    """Size of a logical block, in which commands count."""

    refusal = ""
    """Why it takes no writes, for people, if that is not what its owner asked for."""

    _refuses = True
    """Whether one array that may store to it excludes every other."""

    def __init__(self, nbytes: int, writable: bool = True, path: str | None = None) -> None:
        self._nbytes = integer("nbytes", nbytes, 0, SIZE_MAX)
        self._writable = flag("writable", writable)
        self._name = path
        self._closed = False
        self._served: dict[object, bool] = {}
        """Whether each array that serves it may store to it."""

    @property
    def nbytes(self) -> int:
        """Size of the namespace in bytes."""
        return self._nbytes

    @property
    def writable(self) -> bool:
        """Whether it takes writes."""
        return self._writable

    @property
    def path(self) -> str | None:
        """The file behind it, when there is one."""
        return self._name

    def look_again(self) -> None:
        """Choose again how later transfers are made, if there is a choice. Cheap."""

    def describe(self) -> dict[str, Any]:
        """Return facts for people: kind, path, engine, alignment, reasons."""
        self._check_open()
        return {"kind": "namespace", "nbytes": self.nbytes, "writable": self.writable}

    @property
    def disks(self) -> frozenset[int]:
        """Device numbers of the disks that are read past the page cache now."""
        return frozenset()

    def check_unchanged(self) -> None:
        """Raise StorageError when a file behind it was cut short, replaced or removed.

        An array on it continues with the file as it was.
        """

    def close(self) -> None:
        """Release what it holds, after the arrays that use it. May be called twice."""
        self._closed = True
        if not self._served:
            self._let_go()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _let_go(self) -> None:
        """Release what it holds: it is closed, and no array serves it any more."""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the storage {self.path or 'in memory'} is closed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nbytes} bytes, writable={self.writable})"


class Storage(Namespace):
    r"""Base of all storages: a namespace, and its bytes.

    Notes
    -----
    Any number of threads may call at the same time. A transfer blocks until it is complete. If it
    is not, it raises `StorageError` with errno, path and the offset in the file; `BoundsError` for
    bytes outside of the storage, before any is touched; `ReadOnlyError`; `ClosedError`;
    `DeviceOutOfMemory` if the host has no room for the copy; or `ForkError` in a child of the
    process that opened it.

    Examples
    --------
    >>> from flashwarp.storage import Memory
    >>> with Memory("4 KiB") as storage:
    ...     storage.write(10, b"flash")
    ...     storage.read(8, 9)
    b'\x00\x00flash\x00\x00'
    """

    flushes_in_python = False
    """Whether a flush runs Python, which no kernel should wait for."""

    def __init__(self, native: _native.Storage) -> None:
        super().__init__(native.nbytes, native.writable)
        self._native: Any = native

    @property
    def native(self) -> _native.Storage:
        """The C++ storage, for the controller; ClosedError after `close`."""
        self._check_open()
        return cast("_native.Storage", self._native)

    def describe(self) -> dict[str, Any]:
        """Return facts for people: kind, path, engine, alignment, reasons."""
        return self.native.describe()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of bytes [offset, offset + nbytes), all of them, or raise."""
        self._check_range(offset, nbytes)
        with typed_errors("read"):
            return self.native.read(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a writable contiguous buffer with the bytes from `offset` on, or raise."""
        self._check_range(offset, buffer.nbytes)
        with typed_errors("read"):
            self.native.read_into(offset, buffer)

    def write(self, offset: int, data: Any) -> None:
        """Store a contiguous buffer from byte `offset` on; `flush` makes it durable."""
        self._check_writable()
        try:
            view = memoryview(data)
        except (TypeError, ValueError) as error:  # no buffer, or one of a dtype without a format
            raise ArgumentError(
                f"data of type {type(data).__name__}: {error}; an array of any dtype has its "
                'bytes as data.view("u1")'
            ) from error
        if not view.c_contiguous:
            raise ArgumentError("the data is not contiguous: copy it first")
        self._check_range(offset, view.nbytes)
        with typed_errors("write"):
            self.native.write(offset, data)

    def discard(self, offset: int, nbytes: int) -> None:
        """Deallocate bytes, which then read as zeros, or as before if the medium cannot do it."""
        self._check_writable()
        self._check_range(offset, nbytes)
        with typed_errors("discard"):
            self.native.discard(offset, nbytes)

    def write_zeroes(self, offset: int, nbytes: int) -> None:
        """Store zeros, without a buffer of them."""
        self._check_writable()
        self._check_range(offset, nbytes)
        with typed_errors("write of zeros"):
            self.native.write_zeroes(offset, nbytes)

    def flush(self) -> None:
        """Make all writes durable; blocks."""
        with typed_errors("flush"):
            self.native.flush()

    def flush_served(self) -> None:
        """Flush for an array that serves the storage, which may be closed meanwhile."""
        with typed_errors("flush"):
            cast("_native.Storage", self._native).flush()

    def _let_go(self) -> None:
        self._native = None

    def _check_writable(self) -> None:
        if not self.writable:
            raise ReadOnlyError(
                f"the storage {self.path or 'in memory'} is read-only"
                f"{self.refusal and f': {self.refusal}'}"
            )

    def _check_range(self, offset: int, nbytes: int) -> None:
        offset, nbytes = integer("offset", offset), integer("nbytes", nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise BoundsError(
                f"bytes [{offset}, {offset + nbytes}) of a storage of {self.nbytes} bytes"
            )


@contextlib.contextmanager
def typed_errors(operation: str) -> Iterator[None]:
    """Turn exceptions of a native storage into errors of flashwarp."""
    try:
        yield
    except FlashwarpError:
        raise
    except OSError as error:
        number, path = error.errno or errno.EIO, error.filename
        offset, status = getattr(error, "offset", None), getattr(error, "status", 0)
        raise StorageError(
            number, f"{operation}: {error.strerror}", path or None, offset=offset, status=status
        ) from error
    except RuntimeError as error:  # the only one that it raises
        raise ForkError(str(error)) from error
    except MemoryError as error:
        raise DeviceOutOfMemory(
            f"{operation}: host memory has no room for the bytes: take fewer at a time"
        ) from error
