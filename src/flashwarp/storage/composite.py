"""Several storages as one, and which arrays a storage serves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from flashwarp import _native
from flashwarp.config import SIZE_MAX, integer, parse_bytes
from flashwarp.errors import (
    ArgumentError,
    LockedError,
)
from flashwarp.storage.base import Namespace, Storage


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
