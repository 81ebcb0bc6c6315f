"""NVMe namespaces as storages, by commands that the kernel's driver passes on to the drive."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import cast

from flashwarp import _native
from flashwarp.config import SIZE_MAX, flag, integer
from flashwarp.errors import ArgumentError, MissingFileError, PathError
from flashwarp.storage import block_users, files, signatures
from flashwarp.storage.base import Storage, typed_errors

_PAGE_BYTES = 4096

_WAY_OUT = (
    "choose another namespace, open it for reading, or give allow_raw_writes=True if you know that "
    "nothing there is needed"
)


class Passthrough(Storage):
    """A namespace of a drive that the kernel's driver has, read and written by NVMe commands.

    The software controller sends its commands through the namespace's character device by io_uring
    (``IORING_OP_URING_CMD``, Linux 5.19): no file system, no page cache and no block layer lies in
    between, and the drive stays bound to the kernel's driver. A failure has the drive's own NVMe
    status. Without io_uring, or with an older kernel, threads send the commands by ioctl;
    `Array.explain` says which it is.

    Parameters
    ----------
    path : path-like
        Character device of the namespace, such as ``/dev/ng0n1`` (Linux 5.13).
    offset, nbytes : int, optional
        The range in bytes; default the whole namespace. `offset` is a multiple of the namespace's
        logical blocks. Bytes past `nbytes` are never changed, but their block may be written anew.
    writable : bool
        Open it for writing. The kernel then refuses to mount it, as long as it is open.
    lock : bool
        As for `File`; users of the namespace's block device count too.
    allow_raw_writes : bool
        Write even if the kernel uses the namespace, or a part of it, or if a file system or
        partition table is on it. Whoever gives it keeps the changes apart.

    Raises
    ------
    MissingFileError, PathError
        If it cannot be opened so: no namespace, no permission, in use, not empty.
    LockedError
        If another open storage excludes this one.
    ArgumentError
        For a range that the namespace does not have.

    Notes
    -----
    Before Linux 6.2, the kernel takes NVMe commands only from processes with CAP_SYS_ADMIN. After
    that, permission to open the device is enough: docs/hardware.md says how to give it.

    Other programs' reads through the block device may show old bytes while this is open for
    writing, since they come from the page cache. `close` empties it.

    A command that waits when it is stopped cannot be cancelled: the drive, or the kernel's time
    limit for it (``/sys/module/nvme_core/parameters/io_timeout``, 30 s), ends it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int = 0,
        nbytes: int | None = None,
        *,
        writable: bool = False,
        lock: bool = True,
        allow_raw_writes: bool = False,
    ) -> None:
        name = files.check_name(path)
        offset = integer("offset", offset, 0, SIZE_MAX)
        if nbytes is not None:
            nbytes = integer("nbytes", nbytes, 1, SIZE_MAX)
        writable, lock = flag("writable", writable), flag("lock", lock)
        allowed = flag("allow_raw_writes", allow_raw_writes)
        files.check(name, writable)
        self._path = name
        self.disk = _disk_of(name)
        """Name of the block device of the same namespace, such as "nvme0n1"."""
        native = self._open(offset, nbytes or 0, writable, lock=lock, claim=not allowed)
        # Only now can nobody make a file system there any more.
        if writable and not allowed and (found := self._carried()):
            del native  # which the error's traceback would keep open
            raise PathError(
                errno.EBUSY,
                f"carries {', '.join(found)}, which writes would destroy: {_WAY_OUT}",
                name,
            )
        self.offset = offset
        self.lba_bytes_of_drive = native.lba_bytes
        """Bytes of the drive's logical blocks. Smaller writes read the rest of a block first."""
        super().__init__(native)

    @property
    def path(self) -> str:
        """The character device as it was named."""
        return self._path

    @property
    def native(self) -> _native.NvmePassthrough:
        """The C++ storage, for the controller; ClosedError after `close`."""
        return cast("_native.NvmePassthrough", super().native)

    def _open(
        self, offset: int, nbytes: int, writable: bool, *, lock: bool, claim: bool
    ) -> _native.NvmePassthrough:
        limit = _kernel_limit(self.disk)
        device = f"/dev/{self.disk}"
        try:
            return _native.NvmePassthrough(
                self._path, offset, nbytes, writable, lock, claim, device, limit
            )
        except ValueError as error:
            raise ArgumentError(f"{self._path}: {error}") from error
        except OSError as error:
            raise self._refusal(error, writable) from error

    def _refusal(self, error: OSError, writable: bool) -> PathError | MissingFileError:
        number = error.errno or 0
        why = error.strerror or ""
        if why == os.strerror(number) or "process" in why:  # by open(2), or a lock
            return files.path_error(error, self._path, writable=writable)
        if "in use" in why:
            users = "; ".join(block_users.users_of(self.disk))
            why = f"{why}{f' ({users})' if users else ''}: {_WAY_OUT}"
        return PathError(number, why, self._path)

    def _carried(self) -> list[str]:
        """Return what is on the namespace, as far as it can be recognised."""
        whole = self._open(0, 0, False, lock=False, claim=False)
        with typed_errors("look at what the namespace carries"):
            return signatures.carried_by(whole.read, whole.nbytes)


def _disk_of(path: str) -> str:
    """Return the block device of the same namespace, nvme0n1 for ng0n1; raises PathError."""
    number = os.stat(path).st_rdev
    known = Path(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}").resolve().name
    if not known.startswith("ng"):
        raise PathError(
            errno.ENOTTY,
            "is no character device of an NVMe namespace, such as /dev/ng0n1 (Linux 5.13); for a "
            "file or block device use storage.File or storage.BlockDevice",
            path,
        )
    return f"nvme{known.removeprefix('ng')}"


def _kernel_limit(disk: str) -> int:
    """Return the largest transfer that the kernel passes on, or 0 if it does not say."""
    queue = Path("/sys/block", disk, "queue")
    try:
        nbytes = int((queue / "max_hw_sectors_kb").read_text()) << 10
        segments = int((queue / "max_segments").read_text())
    except (OSError, ValueError):
        return 0
    # Pages anywhere in memory, and one more where the transfer begins inside of one.
    return min(nbytes, max(segments - 1, 1) * _PAGE_BYTES)
