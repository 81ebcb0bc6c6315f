"""Waiting for versions that another process commits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flashwarp._waiting import Waited
from flashwarp.checkpoint.directory import names
from flashwarp.config import number
from flashwarp.errors import WaitTimeout
from flashwarp.storage import files

__all__ = ["Watch"]

_TIMEOUT_S_MAX = 1e9
_POLL_S_MIN = 1e-3
_POLL_S_MAX = 60.0

# File systems stamp changes with a clock that ticks every 10 ms or, over a network, every second.
# So a folder that has just changed may change again under the same stamp.
_STAMP_S = 2.0


class Watch:
    """Looks at a folder until new manifests appear."""

    def __init__(self, folder: Path, timeout_s: float, poll_s: float, what: str) -> None:
        self._folder = folder
        self._timeout_s = number("timeout_s", timeout_s, 0, _TIMEOUT_S_MAX)
        self._poll_s = number("poll_s", poll_s, _POLL_S_MIN, _POLL_S_MAX)
        self._what = what
        self._stamp: tuple[int, ...] | None = None
        self._changed_at = 0.0
        self._listed: list[int] = []

    def versions(self, check: Callable[[], None], until: int | None) -> Iterator[int]:
        """Yield versions as `Directory.follow` promises; `check` raises if it must end."""
        seen: set[int] = set()
        waited = Waited()
        while True:
            check()
            there = self._look()
            fresh = [version for version in there if version not in seen]
            for version in fresh:
                yield version
                if version == until:
                    return
            # Never more than what the folder holds.
            seen = set(there)
            if fresh:
                waited = Waited()
                continue
            seconds = waited.look()
            if seconds >= self._timeout_s:
                raise WaitTimeout(
                    f"{self._what} did not appear in {self._folder} within {self._timeout_s:g} s"
                )
            self._wait(min(self._poll_s, self._timeout_s - seconds), waited)

    def _wait(self, seconds: float, waited: Waited) -> None:
        """Sleep in steps that the clock of the wait counts fully."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._poll_s, 0.05))
            waited.look()

    def _look(self) -> list[int]:
        """Return the versions that are there; lists the folder only if it may have changed."""
        try:
            status = os.stat(self._folder)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            now = time.monotonic()
            if stamp != self._stamp:
                self._stamp, self._changed_at = stamp, now
            elif now - self._changed_at > _STAMP_S:
                return self._listed
            self._listed = names.versions_among(os.listdir(self._folder))
        except FileNotFoundError:
            self._listed = []
        except OSError as error:
            raise files.path_error(error, str(self._folder), writable=False) from error
        return self._listed
