"""The lock of a rank: one process at a time writes it in a directory.

flock(2) on a file of its own, which stays; the kernel ends the lock of a process that dies.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from pathlib import Path

from flashwarp import _native
from flashwarp.errors import LockedError
from flashwarp.storage import files

_log = logging.getLogger(__name__)


class RankLock:
    """The lock of a rank, taken; raises LockedError if another object or process has it.

    `held` is False if the file system has no locks; then a warning was logged.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = lock_path(folder, rank)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise files.write_error(error, path) from error
        number = _native.lock_for_writing(self._descriptor)
        self.held = number == 0
        if number == errno.EWOULDBLOCK:
            os.close(self._descriptor)
            raise _locked(path, rank)
        if number != 0:
            _log.warning(
                "%s has no locks (%s): see to it that one process writes rank %d",
                folder,
                os.strerror(number),
                rank,
            )
        _taken.add(self)

    def release(self) -> None:
        """Give the lock up. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def lock_path(folder: Path, rank: int) -> str:
    """Return the file that carries the lock of a rank."""
    return str(folder / f".rank-{rank:05d}.lock")


def _locked(path: str, rank: int) -> LockedError:
    holder = files.lock_holder(path)
    who = "another process" if holder is None else f"process {holder}"
    if holder == os.getpid():
        who = f"this process ({holder})"
    return LockedError(
        errno.EWOULDBLOCK,
        f"{who} writes rank {rank} here: use another rank or path, wait until it closes its "
        "directory, or only read: config={'read_only': True} of a Checkpointer, writable=False of "
        "a Directory",
        path,
        holder,
    )


_taken: weakref.WeakSet[RankLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A child shares its parent's descriptors, and would keep the lock after the parent's end."""
    for each in list(_taken):
        each.release()


os.register_at_fork(after_in_child=_release_in_child)
