"""What holds the bytes of an array: host memory, a file, a block device, or several of these.

A storage knows bytes, not arrays. Its namespace has logical blocks of 512 bytes, from byte 0 on. It
handles the alignment that O_DIRECT requires. Storages are thread-safe. The caller that opens a
storage owns it, and a controller keeps its storage alive.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from flashwarp import _native, config, files
from flashwarp.config import SIZE_MAX, flag, integer, parse_bytes
from flashwarp.endings import NotCopied
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DeviceOutOfMemory,
    DtypeError,
    FlashwarpError,
    ForkError,
    LockedError,
    PathError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.lease import Lease

__all__ = ["BlockDevice", "File", "Memory", "Namespace", "Replicated", "Storage", "Striped"]


class Namespace(NotCopied):
    """What an array lies on, described: a size in logical blocks, and whether it takes writes.

    The bytes are wherever the array's controller finds them. For a controller of your own, that
    serves what is no file and no memory; the software controller needs a `Storage`.

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

    _refuses = True
    """Whether one array that may store to it excludes every other."""

    def __init__(self, nbytes: int, writable: bool = True, path: str | None = None) -> None:
        self._nbytes = integer("nbytes", nbytes, 1, SIZE_MAX)
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
        """Choose anew, at a cheap moment, how later transfers are made, if there is a choice."""

    def describe(self) -> dict[str, Any]:
        """Return facts for people: kind, path, engine, alignment, reasons."""
        self._check_open()
        return {"kind": "namespace", "nbytes": self.nbytes, "writable": self.writable}

    def check_unchanged(self) -> None:
        """Raise StorageError when a file behind it was cut short, replaced or removed.

        Such a change is by others: an array on it goes on with what the file was.
        """

    def close(self) -> None:
        """Let go of what it holds; an array that serves it goes on. May be called twice."""
        self._closed = True
        if not self._served:
            self._let_go()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _let_go(self) -> None:
        """Release what it holds: it is closed, and no array serves it any more."""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the storage {self.path or 'in memory'} is closed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nbytes} bytes, writable={self.writable})"


class Storage(Namespace):
    r"""Base of all storages: a namespace, and its bytes.

    Attributes
    ----------
    nbytes : int
        Size of the namespace in bytes.
    writable : bool
        Whether it takes writes.

    Notes
    -----
    Any number of threads may call at the same time. Transfers block, and are whole or raise:
    `StorageError` with errno, path and the offset in the file; `BoundsError` for bytes outside of
    the storage, of which nothing is touched; `ReadOnlyError`; `ClosedError`; `DeviceOutOfMemory`
    when the host has no room for the copy; and `ForkError` in a child of the process that opened
    it.

    Examples
    --------
    >>> from flashwarp.storage import Memory
    >>> with Memory("4 KiB") as storage:
    ...     storage.write(10, b"flash")
    ...     storage.read(8, 9)
    b'\x00\x00flash\x00\x00'
    """

    def __init__(self, native: Any) -> None:
        super().__init__(int(native.nbytes), bool(native.writable))
        self._native = native

    @property
    def native(self) -> Any:
        """The C++ storage, for the controller; ClosedError after `close`."""
        self._check_open()
        return self._native

    def describe(self) -> dict[str, Any]:
        """Return facts for people: kind, path, engine, alignment, reasons."""
        return dict(self.native.describe())

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of bytes [offset, offset + nbytes): never fewer, never zeros for lost."""
        self._check_range(offset, nbytes)
        with _typed_errors("read"):
            return bytes(self.native.read(offset, nbytes))

    def write(self, offset: int, data: Any) -> None:
        """Store a contiguous buffer from byte `offset` on; `flush` makes it durable."""
        self._check_writable()
        try:
            view = memoryview(data)
        except TypeError as error:
            raise ArgumentError(f"data of type {type(data).__name__}: {error}") from error
        if not view.c_contiguous:
            raise ArgumentError("the data is not contiguous: copy it first")
        self._check_range(offset, view.nbytes)
        with _typed_errors("write"):
            self.native.write(offset, data)

    def discard(self, offset: int, nbytes: int) -> None:
        """Give bytes up; they read as zeros, or as before where the medium cannot forget."""
        self._check_writable()
        self._check_range(offset, nbytes)
        with _typed_errors("discard"):
            self.native.discard(offset, nbytes)

    def write_zeroes(self, offset: int, nbytes: int) -> None:
        """Store zeros, without a buffer of them."""
        self._check_writable()
        self._check_range(offset, nbytes)
        with _typed_errors("write of zeros"):
            self.native.write_zeroes(offset, nbytes)

    def flush(self) -> None:
        """Make all writes durable; blocks."""
        with _typed_errors("flush"):
            self.native.flush()

    def _let_go(self) -> None:
        self._native = None

    def _check_writable(self) -> None:
        if not self.writable:
            raise ReadOnlyError(f"the storage {self.path or 'in memory'} is read-only")

    def _check_range(self, offset: int, nbytes: int) -> None:
        offset, nbytes = integer("offset", offset), integer("nbytes", nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise BoundsError(
                f"bytes [{offset}, {offset + nbytes}) of a storage of {self.nbytes} bytes"
            )


@contextlib.contextmanager
def _typed_errors(operation: str) -> Iterator[None]:
    """Turn exceptions of a native storage into errors of flashwarp."""
    try:
        yield
    except FlashwarpError:
        raise
    except OSError as error:
        number, path = error.errno or errno.EIO, error.filename
        raise StorageError(
            number, f"{operation}: {error.strerror}", path or None, offset=_offset_of(error)
        ) from error
    except RuntimeError as error:  # the only one that it raises
        raise ForkError(str(error)) from error
    except MemoryError as error:
        raise DeviceOutOfMemory(
            f"{operation}: host memory has no room for the bytes: take fewer at a time"
        ) from error


def _offset_of(error: OSError) -> int | None:
    offset = getattr(error, "offset", None)
    return None if offset is None else int(offset)


class Memory(Storage):
    """Host memory as a namespace: a numpy array, or anything with the buffer protocol.

    Parameters
    ----------
    data : buffer or int
        The memory itself, kept alive and never copied. Or a size in bytes: allocate zeros.
    writable : bool, optional
        Default: whether the buffer is.

    Notes
    -----
    An array knows only of stores that go through it. After you have written to the memory yourself,
    call the array's `drop_cache`. Until then the array may have the old bytes, or parts of both for
    a line that it read while you wrote. Stores through another `Memory` on the same bytes count as
    yours.
    """

    def __init__(self, data: Any, writable: bool | None = None) -> None:
        if isinstance(data, int | str):
            data = _zeros(parse_bytes(data))
        try:
            array: npt.NDArray[Any] = (
                data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
            )
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"data of type {type(data).__name__} is neither a size nor contiguous memory: "
                f"{error}"
            ) from error
        if array.dtype.hasobject:
            raise DtypeError("the memory holds Python objects, whose bytes are addresses")
        if not array.flags.c_contiguous:
            raise ArgumentError("the memory is not contiguous: copy it first")
        allowed = bool(array.flags.writeable) if writable is None else flag("writable", writable)
        if allowed and not array.flags.writeable:
            raise ReadOnlyError("the memory is read-only, so the storage cannot be writable")
        self.array = array
        self.address = int(array.ctypes.data)
        super().__init__(_native.MemoryStorage(self.address, array.nbytes, allowed, array))


def _zeros(nbytes: int) -> npt.NDArray[np.uint8]:
    try:
        return np.zeros(nbytes, np.uint8)
    except MemoryError as error:
        raise DeviceOutOfMemory(
            f"{nbytes} bytes of host memory for a storage: give it fewer, or use a File"
        ) from error


class Review(Protocol):
    """Looks at the reads of a file from time to time; see `file_access.WayReview`."""

    changes: list[str]

    def look(self, file: Any) -> None:
        """Look, and change the way of the native file if there is a reason."""


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
        lock ends when this storage and all arrays on it are closed. If False, the file neither
        checks for others nor is seen by others, and may serve several arrays that store.

    Raises
    ------
    MissingFileError, PathError
        When it cannot be opened as asked.
    LockedError
        When another open file excludes this one; `holder` says in which process.
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
        _map_address: int = 0,
        _mapping: Any = None,
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
        # A file that is read in place needs a window only for the time after its lease.
        copies = bool(config.current().copy_cached) and (_mapping is None or _lease is not None)
        native = files.opened(
            lambda: _native.FileStorage(
                name,
                offset,
                nbytes or 0,
                writable,
                "direct" if o_direct else "buffered",
                _map_address,
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
        # Where it is still after a change of the working directory.
        self._absolute = Path(self._path).absolute()
        super().__init__(native)

    @property
    def path(self) -> str | None:
        """The file as it was named."""
        return self._path

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
        """Change to the page cache or to O_DIRECT, if you left the choice and the change pays.

        Costs 0.2 us, and 50 us each time that `Config.review_bytes` were read.
        """
        if self.review is not None:
            self.review.look(self.native)

    def describe(self) -> dict[str, Any]:
        """Return facts for people, as `Storage.describe`; ``changed`` lists changes of the way."""
        facts = super().describe()
        if self.review is not None and self.review.changes:
            facts["changed"] = "; ".join(self.review.changes)
        return facts


class BlockDevice(File):
    """A block device, whole or in part, always past the page cache.

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


def _storages(members: Sequence[Storage]) -> tuple[Storage, ...]:
    if not isinstance(members, Sequence) or not all(isinstance(m, Storage) for m in members):
        raise ArgumentError(f"members={members!r} is not a sequence of storages")
    parts = [part for member in members for part in members_of(member)]
    if len(set(map(id, parts))) != len(parts):
        raise ArgumentError("a storage is named twice: its bytes would be in two places")
    return tuple(members)


class _Composite(Storage):
    """Several storages as one."""

    members: tuple[Storage, ...]

    def check_unchanged(self) -> None:
        """Raise StorageError for the first member whose file was changed."""
        for member in self.members:
            member.check_unchanged()


class Striped(_Composite):
    """Several storages as one, in stripes dealt round robin.

    Parameters
    ----------
    members : sequence of Storage
        At least one; no storage twice.
    stripe : int or str
        Bytes of a stripe, a multiple of 4096.
    nbytes : int, optional
        Size to use; default: as many whole stripes as all members hold.
    """

    def __init__(
        self, members: Sequence[Storage], stripe: int | str = "128 KiB", nbytes: int | None = None
    ) -> None:
        self.members = _storages(members)
        self.stripe_bytes = parse_bytes(stripe, "stripe")
        if nbytes is not None:
            nbytes = integer("nbytes", nbytes, 1, SIZE_MAX)
        natives = [member.native for member in self.members]
        try:
            native = _native.StripedStorage(natives, self.stripe_bytes, nbytes or 0)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        super().__init__(native)


class Replicated(_Composite):
    """Several storages with the same bytes: reads go round robin, writes to all.

    If a read fails on one member, the next is tried. Members must have equal sizes, and no storage
    may be named twice.
    """

    def __init__(self, members: Sequence[Storage]) -> None:
        self.members = _storages(members)
        natives = [member.native for member in self.members]
        try:
            native = _native.ReplicatedStorage(natives)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        super().__init__(native)


def members_of(storage: Namespace) -> tuple[Namespace, ...]:
    """Return the storages that hold the bytes of one: it, or those that it is made of."""
    if not isinstance(storage, Striped | Replicated):
        return (storage,)
    return tuple(inner for member in storage.members for inner in members_of(member))


def serve(storage: Namespace, stores: bool) -> Callable[[], None]:
    """Note that an array begins to serve a storage; return what notes its end.

    `stores` says whether the array may store to it.

    Raises
    ------
    LockedError
        When another array serves it or a part of it, and one of the two may store.
    ClosedError
    """
    storage._check_open()
    parts = members_of(storage)
    array = object()

    # No lock: a lost array may end inside of any line here. Of two that begin at the same time,
    # each sees at least the other, so that both may be refused, and never both accepted.
    def end() -> None:
        for part in parts:
            part._served.pop(array, None)
            if part.closed and not part._served:
                part._let_go()

    for part in parts:
        part._served[array] = stores
    for part in parts:
        others = part._served.copy()
        del others[array]
        if part._refuses and others and (stores or any(others.values())):
            end()
            raise LockedError(
                errno.EWOULDBLOCK,
                "another array serves this storage, and their caches do not know of each other: "
                "use that array; or give each a storage of its own, a File with lock=False, if you "
                "keep their changes apart",
                part.path or "memory",
                os.getpid(),
            )
    return end


class Mapping:
    """A file's pages, mapped read-only, which a GPU reads in place."""

    def __init__(self, path: Path, nbytes: int) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.identity = status.st_dev, status.st_ino
            self._map = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view = np.frombuffer(self._map, np.uint8)
        self.address = int(self._view.ctypes.data)
        self.nbytes = nbytes

    def residency(self) -> float:
        """Share of its pages that are in the page cache now."""
        return float(_native.residency(self.address, self.nbytes))

    def leave(self) -> None:
        """Replace the file's pages by zeros, so that no thread dies of SIGBUS if the file is cut.

        Only for pages that no device has registered. A thread that reads them meanwhile must check
        afterwards whether they were replaced.
        """
        _native.replace_mapping(self.address, self.nbytes)

    def close(self) -> None:
        """Unmap it. No thread or device may use its address any more. May be called twice."""
        if not self._map.closed:
            del self._view
            self._map.close()
