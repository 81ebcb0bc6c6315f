"""Folders that only this user can write to, held by descriptor while they are used.

Code in such a folder is loaded and run. So its owner and mode are checked on the descriptor through
which files are opened: no other user can exchange the folder between the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flashwarp.errors import CompileError

# Folders on the way: to be passed through needs no permission to read.
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Whom the kernel names in place of a user that this user namespace has no number for, such as root
# outside of a container.
_UNMAPPED_UID = 65534

BUILD_BYTES = 16 << 20
"""Room that a build folder needs for a program's preprocessed text, assembly and library."""

_BUILD_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


class UnsafeFolderError(Exception):
    """A folder that others may write to; `advice` is what the user can do about it."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.advice = advice


@contextlib.contextmanager
def opened(path: Path, *, create: bool) -> Iterator[int]:
    """Open a folder of this user with mode 0700; yields its descriptor.

    Symbolic links are resolved first; then each folder from the root on is opened without following
    links. No folder on the way may be writable by others, but for sticky ones. `create` makes the
    folders that are missing.

    Raises UnsafeFolderError when the folder, or one above it, could have been written to by others,
    and OSError when it cannot be opened or made; FileNotFoundError when it is absent.
    """
    names = os.path.realpath(path).split("/")[1:]
    folder = Path("/")
    handle = os.open(folder, _PASSED)
    try:
        for name in filter(None, names):
            _check_passed(os.fstat(handle), folder)
            folder /= name
            last = folder == Path("/", *names)
            below = _enter(name, handle, _LISTED if last else _PASSED, create)
            os.close(handle)
            handle = below
        _check_private(os.fstat(handle), folder)
        yield handle
    finally:
        os.close(handle)


def _enter(name: str, parent: int, flags: int, create: bool) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def _check_passed(status: os.stat_result, folder: Path) -> None:
    """Check a folder above: whoever may rename in it may exchange what lies below."""
    elsewhere = "let FLASHWARP_CACHE_DIR name a folder below ones that only you may write to"
    if status.st_uid not in (0, os.geteuid(), _UNMAPPED_UID):
        raise UnsafeFolderError(f"{folder}, above it, belongs to user {status.st_uid}", elsewhere)
    # A group that is this process's own: on many systems each user has a private one.
    own_group = status.st_gid in (0, os.getegid())
    others = stat.S_IWOTH | (0 if own_group else stat.S_IWGRP)
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeFolderError(
            f"others may write to {folder}, above it (mode {mode:04o})",
            f"chmod go-w {folder}, or {elsewhere}",
        )


def _check_private(status: os.stat_result, folder: Path) -> None:
    elsewhere = "let FLASHWARP_CACHE_DIR name another folder"
    if status.st_uid != os.geteuid():
        raise UnsafeFolderError(
            f"it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}",
            elsewhere,
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UnsafeFolderError(
            f"others have access to it (mode {mode:04o}, not 0700)",
            f"chmod 700 {folder}, or {elsewhere}",
        )


def open_file(name: str, folder: int) -> int:
    """Open a file of this user's for reading, in an opened folder; returns its descriptor.

    Raises UnsafeFolderError when it is no regular file, or others may write to it; or OSError.
    """
    # A FIFO would block without O_NONBLOCK, which changes nothing for regular files.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(name, flags, dir_fd=folder)
    status = os.fstat(handle)
    private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISREG(status.st_mode) and private:
        return handle
    os.close(handle)
    raise UnsafeFolderError(
        f"{name} is no regular file that only user {os.geteuid()} may write to", f"remove {name}"
    )


@contextlib.contextmanager
def build_folder() -> Iterator[Path]:
    """Make a folder for one compilation, removed at the end: TMPDIR, or else a usual place.

    Raises CompileError when no place is safe and has room.
    """
    refused = []
    # tempfile.gettempdir() keeps its first answer, and may answer with the working directory.
    chosen = filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    for place in dict.fromkeys((*map(os.path.abspath, chosen), *_BUILD_PLACES)):
        with contextlib.ExitStack() as stack:
            try:
                made = tempfile.TemporaryDirectory(
                    prefix="flashwarp-", dir=place, ignore_cleanup_errors=True
                )
                folder = Path(os.path.realpath(stack.enter_context(made)))
                handle = stack.enter_context(opened(folder, create=False))
                _check_room(handle)
            except (OSError, UnsafeFolderError) as error:
                refused.append(f"{place}: {error}")
                continue
            yield folder
            return
    raise CompileError(
        f"there is no folder to compile in ({'; '.join(refused)}): let TMPDIR name a folder of "
        f"yours with {BUILD_BYTES >> 20} MiB of room"
    )


def _check_room(folder: int) -> None:
    status = os.fstatvfs(folder)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < BUILD_BYTES:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free")


def check_place(path: Path) -> None:
    """Check that a folder of this user's can be made in an existing one.

    Raises UnsafeFolderError or PermissionError.
    """
    place = Path(os.path.realpath(path))
    for folder in (*reversed(place.parents), place):
        _check_passed(folder.stat(), folder)
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
