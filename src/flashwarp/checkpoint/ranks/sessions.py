"""Which processes are the ranks of a folder now: each has a session, and holds its rank's lock.

A vote counts only while the process that gave it lives. The kernel ends the lock of a process that
dies, so no time limit decides about life and death.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from flashwarp.checkpoint.directory.lock import lock_path
from flashwarp.errors import CheckpointError
from flashwarp.storage import files


class Sessions:
    """Sessions of the ranks of one folder."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._path = path
        self._ranks = ranks
        self._seen: dict[int, str] = {}
        self.own = os.urandom(8).hex()
        self.rank = rank

    def join(self) -> None:
        """Begin the session of this process, which holds the lock of its rank."""
        target = str(self._path / _session_name(self.rank))
        write_json(target, {"session": self.own, "ranks": self._ranks})
        self._seen[self.rank] = self.own

    def alive(self, rank: int) -> str | None:
        """Return the session of a rank whose process lives; None if there is none."""
        if rank == self.rank:
            return self.own
        if not _is_locked(lock_path(self._path, rank)):
            return None
        found = read_json(self._path / _session_name(rank))
        if found is None:
            return None
        if found["ranks"] != self._ranks:
            raise CheckpointError(
                f"rank {rank} was opened with ranks={found['ranks']}, and rank {self.rank} with "
                f"ranks={self._ranks}: open all with the same number"
            )
        self._seen[rank] = str(found["session"])
        return self._seen[rank]

    def ended(self, rank: int) -> bool:
        """Return whether the process of a rank that was seen alive has ended, and no new one."""
        return rank in self._seen and self.alive(rank) is None

    def known(self, rank: int, session: str) -> bool:
        """Return whether a session is, or was, that of a rank since this process has begun."""
        return self._seen.get(rank) == session or self.alive(rank) == session


def _session_name(rank: int) -> str:
    return f".rank-{rank:05d}.session"


def _is_locked(path: str) -> bool:
    """Return whether a process holds a lock; who takes it at this moment tries again."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_json(path: Path) -> dict[str, object] | None:
    """Return what a small file says; None if it is not there."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not what a rank has written")
    return found


def write_json(target: str, content: dict[str, object]) -> None:
    """Write a small file as a whole, durably; raises PathError."""
    with files.replacing(target) as file:
        file.write(json.dumps(content).encode())
