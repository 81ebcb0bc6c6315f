"""Names of shared caches: a folder of this user, with a lock and a socket for each name.

Processes that can be asked for their counters have sockets there, too, under names of their own.

The owner of a name holds its lock, flock(2), for as long as it lives. The kernel ends the lock of a
process that dies, so a name never has to be cleaned up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

from flashwarp import _native
from flashwarp._jit import private_folder
from flashwarp.errors import SharedCacheError
from flashwarp.storage import files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_PROCESS = re.compile(r"\.[0-9]+-[0-9]+\.sock")

# Clients that wait to be accepted. More get EAGAIN.
_BACKLOG = 64


def check_name(name: object) -> str:
    """Return the name of a shared cache, or raise SharedCacheError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SharedCacheError(
            f"shared={name!r} is no name: give 1 to 64 of the letters a to z, A to Z, digits and "
            "_.-, of which the first is a letter, a digit or _"
        )
    return name


def of_process(pid: int) -> str:
    """Return the name of a process of this namespace of processes. No shared cache has it."""
    return f".{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


def processes() -> list[str]:
    """Return the names of processes that can be asked, and of some that have died."""
    try:
        with _opened(create=False) as folder:
            found = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(each.removesuffix(".sock") for each in found if _PROCESS.fullmatch(each))


def folder_path() -> Path:
    """Return the folder of the names: FLASHWARP_RUNTIME_DIR, or in the user's runtime folder."""
    if chosen := os.environ.get("FLASHWARP_RUNTIME_DIR"):
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if os.path.isdir(runtime):
        return Path(runtime, "flashwarp")
    return Path(f"/tmp/flashwarp-{os.geteuid()}")


@contextlib.contextmanager
def _opened(*, create: bool) -> Iterator[str]:
    """Open the folder; yields a path that leads there, short and whatever becomes of its name.

    The path of a socket has at most 107 bytes, and the folder's may be longer.
    """
    path = folder_path()
    try:
        with private_folder.opened(path, create=create) as folder:
            yield f"/proc/self/fd/{folder}"
    except private_folder.UnsafeFolderError as error:
        raise SharedCacheError(
            f"shared caches cannot meet in {path}: {error}; let FLASHWARP_RUNTIME_DIR name a "
            "folder of yours with mode 0700"
        ) from None


class OwnerLock:
    """The lock of a name, which its owner holds."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    @classmethod
    def take(cls, name: str) -> OwnerLock | None:
        """Take the lock; returns None if another process, or another cache, has it."""
        with _opened(create=True) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(f"{folder}/{name}.lock", flags, 0o600)
        number = _native.lock_for_writing(descriptor)
        if number == 0:
            return cls(descriptor)
        os.close(descriptor)
        if number == errno.EWOULDBLOCK:
            return None
        raise SharedCacheError(
            f"the lock of the shared cache {name!r} cannot be taken: {os.strerror(number)}; let "
            "FLASHWARP_RUNTIME_DIR name a folder on a local file system"
        )

    def release(self) -> None:
        """Give the lock up. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def holder(name: str) -> int | None:
    """Return the process that owns a name, if the system shows it."""
    return files.lock_holder(str(folder_path() / f"{name}.lock"))


def listen(name: str) -> socket.socket:
    """Listen under a name, which is the caller's alone: it holds the lock, or is the process."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _opened(create=True) as folder:
            draft = f"{folder}/{name}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)  # of one who has died
            server.bind(draft)
            os.chmod(draft, 0o600)
            server.listen(_BACKLOG)
            # Last, over that of one who has died: whoever finds the name finds one who listens.
            os.rename(draft, f"{folder}/{name}.sock")
    except BaseException:
        server.close()
        raise
    return server


def remove(name: str) -> None:
    """Remove the socket of a name that is the caller's alone, or of a process that has died."""
    with contextlib.suppress(OSError, SharedCacheError), _opened(create=False) as folder:
        os.unlink(f"{folder}/{name}.sock")


def reach(name: str) -> socket.socket | None:
    """Connect to the owner of a name; returns None if nobody listens there.

    Raises BlockingIOError if many wait to be accepted, as by one that is stopped.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with _opened(create=False) as folder:
            client.connect(f"{folder}/{name}.sock")
        client.setblocking(True)
    except (FileNotFoundError, ConnectionRefusedError):
        client.close()
        return None
    except BaseException:
        client.close()
        raise
    return client


_held: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A child shares its parent's descriptors, and would keep the name after the parent's end."""
    for each in list(_held):
        each.release()


os.register_at_fork(after_in_child=_release_in_child)
