"""Files by name: which may be opened and made, and typed errors for all others.

Regular files and block devices only. Their kind is checked on the open descriptor, so no process
can exchange the file in between; `native/storage/open_file.h` says how.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeAlias, TypeGuard, TypeVar

from flashwarp import _native
from flashwarp.config import brief
from flashwarp.errors import (
    ArgumentError,
    ExistingFileError,
    FlashwarpError,
    LockedError,
    MissingFileError,
    PathError,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

PathLike: TypeAlias = str | bytes | os.PathLike[str]
"""What names a file."""

# The kernel takes a lease back after /proc/sys/fs/lease-break-time, 45 s by default.
_LEASE_WAIT_S = 60.0
_LEASE_POLL_S = 0.005


# Of Linux, with the null byte at the end.
_PATH_MAX = 4096


def is_path(given: object) -> TypeGuard[PathLike]:
    """Whether this is of a type that names files, everywhere in flashwarp."""
    return isinstance(given, str | bytes | os.PathLike)


def check_name(path: object) -> str:
    """Return the name of a file as text, or raise ArgumentError for what names none."""
    if not is_path(path):
        raise ArgumentError(f"{brief(path)} is not a path: {_instead(path)}")
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        raise ArgumentError(f"{brief(path)} is not a path: {error}") from error
    if not name:
        raise ArgumentError("the path is empty")
    if "\0" in name:
        raise ArgumentError(
            f"the path {brief(name)} contains a null byte, which no file name can: for memory give "
            "a storage.Memory"
        )
    if len(name) >= _PATH_MAX:
        raise PathError(
            errno.ENAMETOOLONG,
            f"a path of {len(name)} characters, and none is so long: for memory give a "
            "storage.Memory",
            name[:100],
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PathError(
            errno.EILSEQ, "the name is no UTF-8: rename the file, or make a link to it", name
        ) from error
    return name


def _instead(path: object) -> str:
    if isinstance(path, int):
        return f"for a file descriptor give '/proc/self/fd/{path}'"
    if hasattr(path, "getbuffer"):
        return "for memory give a storage.Memory(x.getbuffer())"
    if hasattr(path, "read"):
        return "for an open file give its name"
    return "give a str, bytes or pathlib.Path"


def check(path: str, writable: bool) -> os.stat_result:
    """Refuse by name what cannot be opened; the open descriptor is checked again.

    Raises MissingFileError or PathError.
    """
    status = _status(path, writable)
    if stat.S_ISDIR(status.st_mode):
        raise PathError(errno.EISDIR, "is a directory, not a file", path)
    for how, refused in ((os.R_OK, False), (os.W_OK, True)):
        if (how == os.R_OK or writable) and not os.access(path, how):
            _status(path, writable)  # it may have been removed meanwhile
            number = _refusal(path) if refused else errno.EACCES
            raise path_error(OSError(number, ""), path, writable=refused)
    return status


def _refusal(path: str) -> int:
    """Return why the system lets nobody write a file that is there, or at least not this user."""
    return errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES


def _status(path: str, writable: bool) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise path_error(error, path, writable=writable) from error


def open_for_reading(path: str) -> BinaryIO:
    """Open a regular file or block device; never waits for a FIFO. Raises as `check` does."""
    return os.fdopen(opened(lambda: _native.open_file(path), path, writable=False), "rb")


class Stamp(NamedTuple):
    """Which file it is, and its state as far as the file system shows it.

    A file that has the same stamp later was most likely not written in between: the times have the
    resolution of the kernel's clock, some milliseconds. A program can set the time of the last
    write back, but not that of the last change.
    """

    device: int
    inode: int
    nbytes: int  # 0 for a block device
    modified_ns: int
    changed_ns: int


def stamp(descriptor: int) -> Stamp:
    """Return the stamp of an open file."""
    status = os.fstat(descriptor)
    return Stamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def opened(attempt: Callable[[], T], path: str, *, writable: bool) -> T:
    """Return what `attempt` opens, after other processes have ended their leases.

    Raises MissingFileError, LockedError or PathError.
    """
    end = time.monotonic() + _LEASE_WAIT_S
    while True:
        try:
            return _within_limits(attempt)
        except OSError as error:
            if error.errno != errno.EINPROGRESS or time.monotonic() >= end:
                raise path_error(error, path, writable=writable) from error
        time.sleep(_LEASE_POLL_S)


def _within_limits(attempt: Callable[[], T]) -> T:
    """Return what `attempt` opens, if need be with more descriptors than the soft limit."""
    try:
        return attempt()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _raise_descriptor_limit()
    return attempt()


def _raise_descriptor_limit() -> None:
    """Raise the process's limit of descriptors to the hard one.

    Only when it is reached: in a program that calls select(), descriptors from 1,024 on fail.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a container may refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _log.info("raised the limit of descriptors from %d to the hard one, %d", soft, hard)


def _no_descriptor(why: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{why}, {limit:,} in this process: close arrays, or raise the hard limit (ulimit -n)"


def path_error(error: OSError, path: str, *, writable: bool) -> MissingFileError | PathError:
    """Say why a file could not be opened, and what can be done."""
    number = error.errno or errno.EIO
    if number == errno.ENOENT:
        return _missing(path)
    if number in (errno.EWOULDBLOCK, errno.EDEADLK):
        return _locked(number, error.strerror or "", path)
    why = error.strerror or os.strerror(number)
    if number == errno.EINPROGRESS:
        number = errno.EBUSY
        why += f", and has not given it up in {_LEASE_WAIT_S:g} s"
    if number in (errno.EACCES, errno.EPERM):
        if writable:
            why = 'is not writable for this user: open it with mode="r", or change its permissions'
        else:
            why = "is not readable for this user: change its permissions"
    elif number == errno.EROFS and writable:
        why = 'lies on a file system that is mounted read-only: open it with mode="r"'
    elif number == errno.ETXTBSY and writable:
        why = 'is a program that runs: open it with mode="r"'
    elif number == errno.ENOTDIR:
        why = "treats a file as a folder: remove what follows the file's name, as a slash"
    elif number == errno.EMFILE:
        why = _no_descriptor(why)
    elif number == errno.ENFILE:
        why = f"{why}: close arrays, or raise the limit (ulimit -n)"
    return PathError(number, why, path)


def _missing(path: str) -> MissingFileError:
    """Say which part of a path does not exist."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        return MissingFileError(errno.ENOENT, f"the folder {folder} does not exist", path)
    why = "is a link to what does not exist" if Path(path).is_symlink() else "no such file"
    return MissingFileError(errno.ENOENT, why, path)


# New files.


def check_new(name: str, overwrite: bool) -> str:
    """Return the file that may be made under a name, with links followed.

    Raises ExistingFileError when it exists and `overwrite` is false; ArgumentError,
    MissingFileError or PathError when nothing can be made there.
    """
    if name.endswith("/"):
        raise ArgumentError(f"the path {name!r} ends with a slash, as a folder's: name a file")
    target = os.path.realpath(name)
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        folder = Path(target).parent
        if not folder.is_dir():
            raise _missing(name) from None
        return target
    except OSError as error:
        raise path_error(error, name, writable=True) from error
    if stat.S_ISDIR(status.st_mode):
        raise PathError(errno.EISDIR, "is a directory, not a file", name)
    if not overwrite:
        raise ExistingFileError(
            errno.EEXIST,
            'exists: open it with flashwarp.open(path, "r+"), choose another name, or give '
            "overwrite=True to replace it",
            name,
        )
    if not stat.S_ISREG(status.st_mode):
        raise PathError(errno.EINVAL, "is no regular file, and nothing else is replaced", name)
    if not os.access(target, os.W_OK):
        if _refusal(target) == errno.EROFS:
            raise write_error(OSError(errno.EROFS, ""), name)
        raise PathError(errno.EACCES, "is write-protected for this user: remove it first", name)
    return target


def check_replaceable(folder: Path, names: Sequence[str], look: Callable[[Path], object]) -> None:
    """Raise ExistingFileError if there are files of these names, and `look` raises for them."""
    there = [name for name in names if os.path.lexists(folder / name)]
    if not there:
        return
    try:
        look(folder)
    except FlashwarpError as error:
        raise ExistingFileError(
            errno.EEXIST,
            f"holds {', '.join(there)}, which flashwarp has not written ({error}): name another "
            "folder, or remove these files first",
            str(folder),
        ) from error


class Draft:
    """A file that is built beside its target and takes its name at once, by `publish`.

    If `publish` was not called, the end of the ``with`` statement removes it. Until then the file
    that it replaces is locked. The new file gets its owner and permissions.

    `target` is the final name, as `check_new` returns it. With `lock`, a writer of the old file is
    a reason to refuse.
    """

    def __init__(self, target: str, overwrite: bool, lock: bool) -> None:
        self.target = target
        self.descriptor = -1
        self._folder_descriptor: int | None = None
        self._overwrite = overwrite
        self._lock = lock
        self._folder = str(Path(target).parent)
        # No other process can guess it, and it fits beside a target name of any length.
        self.path = str(Path(self._folder) / f".flashwarp-{os.urandom(8).hex()}")
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as made:
            old = self._old_file(made)
            made.callback(self._remove)
            with writing(self.target):
                # Opened here, if that is allowed: later the process may have no descriptor left.
                with contextlib.suppress(PermissionError):
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                    self._folder_descriptor = _within_limits(lambda: os.open(self._folder, flags))
                    made.callback(os.close, self._folder_descriptor)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self.descriptor = _within_limits(lambda: os.open(self.path, flags, 0o666))
                made.callback(os.close, self.descriptor)
                if old is not None:
                    with contextlib.suppress(PermissionError):
                        os.fchown(self.descriptor, old.st_uid, old.st_gid)
                    os.fchmod(self.descriptor, stat.S_IMODE(old.st_mode))
            self._held = made.pop_all()
        return self

    def _old_file(self, held: contextlib.ExitStack) -> os.stat_result | None:
        """Return the status of the file to replace, and keep writers from it until the end."""
        if not self._overwrite:
            return None
        try:
            file = held.enter_context(open_for_reading(self.target))
        except MissingFileError:
            return None
        if self._lock:
            # Another error than this is that of a file system without locks.
            if (number := _native.lock_for_writing(file.fileno())) == errno.EWOULDBLOCK:
                raise _locked(number, "", self.target)
            if number == 0:
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)
        return os.fstat(file.fileno())

    def warn_of_room(self, nbytes: int) -> None:
        """Warn if the file system has less room than a sparse file will take."""
        system = os.fstatvfs(self.descriptor)
        room = system.f_bavail * system.f_frsize
        if nbytes > room and system.f_blocks:  # some do not know how large they are
            warnings.warn(
                f"{self.target} has {nbytes / 1e9:.4g} GB, and its file system has room for "
                f"{room / 1e9:.4g} GB: the file is sparse, and stores fail when the room is used",
                stacklevel=3,
            )

    def publish(self) -> None:
        """Give the file its name, durably.

        Raises PathError, or ExistingFileError if another process has made a file there in the
        meantime.
        """
        with writing(self.target):
            if self._overwrite:
                os.replace(self.path, self.target)
            else:
                self._take_free_name()
            self._sync_folder()

    def _take_free_name(self) -> None:
        try:
            os.link(self.path, self.target)
        except OSError as error:
            if os.path.lexists(self.target):
                raise ExistingFileError(
                    errno.EEXIST, "was made by another process in the meantime", self.target
                ) from error
            # A file system without hard links. A file that another process makes between these two
            # lines is lost.
            os.rename(self.path, self.target)

    def _sync_folder(self) -> None:
        """Make the name durable. If that fails, remove a new file again."""
        if self._folder_descriptor is None:
            return
        try:
            _sync_open_folder(self._folder_descriptor)
        except OSError:
            if not self._overwrite:
                os.unlink(self.target)
            raise

    def _remove(self) -> None:
        # If this fails, a name is left over, and the file at the target is as good as it was.
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def __exit__(self, *exception: object) -> None:
        self._held.close()


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """Write a file that takes its name, whole and durable, at the end of the ``with`` statement."""
    target = check_new(check_name(path), True)
    with Draft(target, overwrite=True, lock=False) as draft:
        with writing(target):
            with open(draft.descriptor, "wb", closefd=False) as file:
                yield file
            os.fsync(draft.descriptor)
        draft.publish()


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Say of what fails in the ``with`` why a file could not be made; our own errors pass."""
    try:
        yield
    except FlashwarpError:
        raise
    except OSError as error:
        raise write_error(error, path) from error


def write_error(error: OSError, path: str) -> PathError:
    """Say why a file could not be made, and what can be done."""
    number = error.errno or errno.EIO
    folder = Path(path).absolute().parent
    why = {
        errno.EACCES: f"the folder {folder} is not writable for this user: choose another",
        errno.EPERM: f"the folder {folder} does not let this user replace it: choose another",
        errno.EEXIST: "is a file, and a folder is wanted there: choose another name",
        errno.EROFS: f"the folder {folder} is mounted read-only: choose another",
        errno.ENOSPC: f"the file system of {folder} is full: make room, or choose another",
        errno.EDQUOT: f"the quota of this user in {folder} is used up: make room",
        errno.EFBIG: f"the file system of {folder}, or a limit (ulimit -f), has no files so large",
    }.get(number, error.strerror or os.strerror(number))
    return PathError(number, _no_descriptor(why) if number == errno.EMFILE else why, path)


# Folders.


def make_folder(folder: Path) -> None:
    """Make a folder and what lies above it, durably, unless it is there; raises PathError."""
    if os.path.isdir(folder):
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(error, str(folder)) from error
    sync_folder(folder.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, as far as its file system can; raises PathError."""
    with writing(str(Path(folder) / "")):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_open_folder(descriptor)
        finally:
            os.close(descriptor)


def _sync_open_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # What FUSE, 9p, and file systems of other systems answer that sync no folders.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


# Who has a file.


def _locked(number: int, how: str, path: str) -> LockedError:
    opt_out = "or open it with lock=False if you keep the changes apart yourself"
    if number == errno.EDEADLK:
        use = "use that array" if "writing" in how else "close that first"
        return LockedError(
            errno.EWOULDBLOCK,
            f"is {how} (process {os.getpid()}), whose caches do not know of each other: {use}, "
            f"{opt_out}",
            path,
            os.getpid(),
        )
    holder = lock_holder(path)
    if holder == os.getpid():
        who = f"this process ({holder})"
    elif holder is None:
        who = "another process, which /proc/locks does not show,"
    elif not Path(f"/proc/{holder}").exists():
        who = f"process {holder}, which has ended, or more likely one that it forked,"
    else:
        who = f"process {holder}{_command(holder)}"
    return LockedError(
        errno.EWOULDBLOCK,
        f'{who} has it open for writing: wait until it closes it, open it with mode="r", {opt_out}',
        path,
        holder,
    )


def lock_holder(path: str) -> int | None:
    """Return the process that holds flock(2) on a file, if the system shows it."""
    try:
        status = os.stat(path)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    inode = f"{status.st_ino}"
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found: dict[int, bool] = {}
    for line in lines:
        # "7: FLOCK  ADVISORY  WRITE 4242 fe:00:131234 0 EOF", with "->" before what waits for it.
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK" or words[3] != "WRITE":
            continue
        where, _, number = words[5].rpartition(":")
        if number == inode and words[4].isdigit() and int(words[4]) > 0:
            found[int(words[4])] = where == device
    exact = [pid for pid, same_device in found.items() if same_device]
    # Btrfs and overlays show another device there than stat(2): ask the process itself.
    candidates = exact or [pid for pid in found if _has_open(pid, status)]
    return candidates[0] if candidates else None


def _has_open(pid: int, status: os.stat_result) -> bool:
    try:
        return any(
            os.path.samestat(os.stat(each), status) for each in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return ""
