"""Striped, concatenated and replicated storages, and which arrays a storage serves."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, cast

from flashwarp import _native
from flashwarp.config import SIZE_MAX, integer, parse_bytes
from flashwarp.errors import ArgumentError, LockedError, StorageError
from flashwarp.storage import files
from flashwarp.storage.base import Namespace, Storage

Member: TypeAlias = files.PathLike | Storage


class Extent(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file; a member of `Concatenated`."""

    path: files.PathLike
    offset: int
    nbytes: int


# A shorter stripe would split blocks of O_DIRECT; the native storage checks the same.
_STRIPE_BYTES_MIN = 4096
_STRIPE_BYTES_MAX = 1 << 31


class Composite(Storage, ABC):
    """Several storages as one.

    Members may be paths. `flashwarp.open` opens these as it opens a path, each time that it is
    given the composite. Until then the composite has no bytes and no size.

    Attributes
    ----------
    parts : tuple of str, Extent or Storage
        The members as they were given.
    paths : tuple of str
        The files of those that `flashwarp.open` opens.
    """

    _options: tuple[Any, ...] = ()
    """What `__init__` takes besides the members."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.parts = self._checked(members)
        self.paths = tuple(
            files.check_name(part.path if isinstance(part, Extent) else part)
            for part in self.parts
            if not isinstance(part, Storage)
        )
        if self.paths:
            Namespace.__init__(self, 0, path=", ".join(self.paths))
            return
        natives = [member.native for member in self.members]
        try:
            native = self._combine(natives)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        super().__init__(native)

    @property
    def flushes_in_python(self) -> bool:  # type: ignore[override]
        """Whether a member's flush runs Python."""
        return any(member.flushes_in_python for member in self.members)

    def flush(self) -> None:
        """Make all writes durable; blocks."""
        self._check_open()
        self.flush_served()

    def flush_served(self) -> None:
        """Do the same for an array that serves the storage, which may be closed meanwhile."""
        failures: list[StorageError] = []
        for member in self.members:
            try:
                member.flush_served()
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @abstractmethod
    def _combine(self, natives: list[_native.Storage]) -> _native.Storage:
        """Make the native storage."""

    @classmethod
    def _checked(cls, members: Sequence[Any]) -> tuple[str | Extent | Storage, ...]:
        """Return the members, names of files as text; raise ArgumentError for what is none."""
        if isinstance(members, str | bytes) or not isinstance(members, Sequence):
            raise ArgumentError(f"members={members!r} is not a sequence of storages and paths")
        if not members:
            raise ArgumentError("members is empty: give one storage or path at least")
        parts = tuple(map(cls._member, members))
        storages = [part for part in parts if isinstance(part, Storage)]
        leaves = [leaf for storage in storages for leaf in members_of(storage)]
        if len(set(map(id, leaves))) != len(leaves):
            raise ArgumentError("a storage is named twice: its bytes would be in two places")
        return parts

    @classmethod
    def _member(cls, given: Any) -> str | Extent | Storage:
        if isinstance(given, Namespace) and not isinstance(given, Storage):
            raise ArgumentError(
                f"{given!r} describes a namespace without its bytes: give a Storage"
            )
        return given if isinstance(given, Storage) else files.check_name(given)

    def of(self, members: Sequence[Any]) -> Self:
        """Return the same composite of other members."""
        return type(self)(members, *self._options)

    def absolute(self) -> Self:
        """Return the same composite with paths that name the same files in any folder."""
        return self.of([_absolute(part) for part in self.parts])

    @property
    def members(self) -> tuple[Storage, ...]:
        """The storages, in order; ArgumentError while some of them are paths."""
        self._need_storages()
        return cast("tuple[Storage, ...]", self.parts)

    @property
    def nbytes(self) -> int:
        """Size of the namespace in bytes."""
        self._need_storages()
        return super().nbytes

    @property
    def writable(self) -> bool:
        """Whether all members take writes."""
        self._need_storages()
        return super().writable

    @property
    def native(self) -> _native.Storage:
        """The C++ storage, for the controller; ClosedError after `close`."""
        self._need_storages()
        return super().native

    def check_unchanged(self) -> None:
        """Raise StorageError for the first member whose file was changed."""
        for member in self.members:
            member.check_unchanged()

    def _need_storages(self) -> None:
        if self.paths:
            raise ArgumentError(
                f"{self!r} has paths as members, which only flashwarp.open opens: give it a "
                "storage.File for each"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if len(self.paths) == len(self.parts):
            return type(self), (self.parts, *self._options)
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        if not self.paths:
            return super().__repr__()
        return f"{type(self).__name__}({list(self.parts)!r})"


class Striped(Composite):
    """Several storages as one, in stripes dealt round robin.

    Stripe k is stripe k // n of member k % n of n members.

    Parameters
    ----------
    members : sequence of path-like or Storage
        At least one; no storage twice. Paths are for `flashwarp.open`: files of raw data.
    stripe : int or str
        Bytes of a stripe, a multiple of 4096 up to 2 GiB. If it is also a multiple of an array's
        lines, each member can have a controller of its own (docs/architecture.md).
    nbytes : int, optional
        Size to use; default: as many whole stripes as all members hold, at least one.

    Raises
    ------
    ArgumentError
        For other members, a storage named twice, or a size that cannot be.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> drives = [fw.storage.Memory("1 MiB") for _ in range(4)]
    >>> striped = fw.storage.Striped(drives, stripe="64 KiB")
    >>> with fw.open(striped, "r+", "int64", device="cpu") as x:
    ...     x[:3] = [7, 8, 9]
    ...     x.gather(np.array([2, 0])).tolist(), len(x.service.describe()["controllers"])
    ([9, 7], 4)
    """

    def __init__(
        self, members: Sequence[Member], stripe: int | str = "128 KiB", nbytes: int | None = None
    ) -> None:
        self.stripe_bytes = parse_bytes(stripe, "stripe")
        if (
            not _STRIPE_BYTES_MIN <= self.stripe_bytes <= _STRIPE_BYTES_MAX
            or self.stripe_bytes % _STRIPE_BYTES_MIN
        ):
            raise ArgumentError(
                f"stripe={stripe!r} is not a multiple of {_STRIPE_BYTES_MIN} bytes up to 2 GiB"
            )
        if nbytes is not None:
            nbytes = integer("nbytes", nbytes, 1, SIZE_MAX)
        self._options = (self.stripe_bytes, nbytes)
        super().__init__(members)

    def _combine(self, natives: list[_native.Storage]) -> _native.Storage:
        stripe_bytes, nbytes = self._options
        return _native.StripedStorage(natives, stripe_bytes, nbytes or 0)


class Concatenated(Composite):
    """Several storages as one, one behind another.

    So rows of a table that lie in several files, or in several places of a file, are one array.

    Parameters
    ----------
    members : sequence of Storage, path-like or (path, offset, nbytes)
        At least one, and none without bytes; no storage twice. Paths, and ranges of bytes of files,
        are for `flashwarp.open`.

    Raises
    ------
    ArgumentError
        For other members, a storage named twice, or a range that cannot be.

    Notes
    -----
    One controller serves all members, because a line may hold the end of one and the beginning of
    the next. A GPU reads the members in place as it reads one file, if they are read-only: then its
    kernels search for the member of a line that is missing, and take a line from several.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> np.arange(10, dtype="i4").tofile("a.bin")
    >>> np.arange(10, 20, dtype="i4").tofile("b.bin")
    >>> parts = fw.storage.Concatenated([("b.bin", 4, 8), ("a.bin", 0, 12)])
    >>> with fw.open(parts, dtype="i4", device="cpu") as x:
    ...     x[:].tolist()
    [11, 12, 0, 1, 2]
    """

    def __init__(self, members: Sequence[Member | tuple[files.PathLike, int, int]]) -> None:
        super().__init__(members)

    @classmethod
    def _member(cls, given: Any) -> str | Extent | Storage:
        if not isinstance(given, tuple):
            return super()._member(given)
        if len(given) != 3:
            raise ArgumentError(f"{given!r} is no range of a file: give (path, offset, nbytes)")
        path, offset, nbytes = given
        return Extent(
            files.check_name(path),
            integer("offset", offset, 0, SIZE_MAX),
            integer("nbytes", nbytes, 1, SIZE_MAX),
        )

    def _combine(self, natives: list[_native.Storage]) -> _native.Storage:
        return _native.ConcatenatedStorage(natives)


class Replicated(Composite):
    """Several storages with the same bytes: reads go round robin, writes to all.

    If a read fails on one member, the next is tried. A write that fails on one has failed.

    Parameters
    ----------
    members : sequence of path-like or Storage
        At least one, of equal sizes; no storage twice. Paths are for `flashwarp.open`: ``.npy``
        files of equal dtype and shape, or files of raw data.

    Raises
    ------
    ArgumentError
        For other members, a storage named twice, or unequal sizes.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)

    def _combine(self, natives: list[_native.Storage]) -> _native.Storage:
        return _native.ReplicatedStorage(natives)


def _absolute(part: str | Extent | Storage) -> str | Extent | Storage:
    if isinstance(part, Extent):
        return part._replace(path=os.path.abspath(part.path))
    return os.path.abspath(part) if isinstance(part, str) else part


def members_of(storage: Namespace) -> tuple[Namespace, ...]:
    """Return the storages that hold the bytes of one: itself, or those of a composite."""
    if not isinstance(storage, Composite):
        return (storage,)
    return tuple(inner for member in storage.members for inner in members_of(member))


def serve(storage: Namespace, stores: bool) -> Callable[[], None]:
    """Note that an array, which may store if `stores`, uses a storage; return what notes its end.

    Raises ClosedError; or LockedError if another array uses it or a part of it, and one of the two
    may store.
    """
    storage._check_open()
    parts = members_of(storage)
    array = object()

    # No lock: a lost array may end within any line here. If two begin at the same time, at least
    # one sees the other. So both may be refused, but never both accepted.
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
                "use that array; or give each its own storage, a File with lock=False, if you keep "
                "the changes apart yourself",
                part.path or "memory",
                os.getpid(),
            )
    return end
