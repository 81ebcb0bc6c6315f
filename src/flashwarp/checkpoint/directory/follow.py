"""Waiting for versions that another process commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from flashwarp._waiting import STEP_MAX_S, Waited
from flashwarp.config import number
from flashwarp.errors import WaitTimeout

_TIMEOUT_S_MAX = 1e9
_POLL_S_MIN = 1e-3
_POLL_S_MAX = 60.0

# File systems stamp changes with a clock that ticks every 10 ms or, over a network, every second.
# So a folder that has just changed may change again under the same stamp.
_STAMP_S = 2.0


def follow(
    *,
    check: Callable[[], None],
    stamp: Callable[[], object],
    listed: Callable[[], list[int]],
    what: str,
    timeout_s: float,
    poll_s: float,
    until: int | None,
) -> Iterator[int]:
    """Return an iterator over versions as they appear; see `Catalog.follow`.

    `check` raises if the wait must end. `listed` is called only if `stamp` changed lately, or is
    None.
    """
    timeout_s = number("timeout_s", timeout_s, 0, _TIMEOUT_S_MAX)
    poll_s = number("poll_s", poll_s, _POLL_S_MIN, _POLL_S_MAX)
    check()
    return _versions(check, _Look(stamp, listed), what, timeout_s, poll_s, until)


def _versions(
    check: Callable[[], None],
    look: _Look,
    what: str,
    timeout_s: float,
    poll_s: float,
    until: int | None,
) -> Iterator[int]:
    seen: set[int] = set()
    waited = Waited()
    while True:
        check()
        there = look.versions()
        fresh = [version for version in there if version not in seen]
        # Never more than what is there.
        seen = set(there)
        for version in fresh:
            yield version
            if version == until:
                return
        if fresh:  # the time that the caller took does not count
            waited = Waited()
            continue
        seconds = waited.look()
        if seconds >= timeout_s:
            raise WaitTimeout(f"{what} did not appear within {timeout_s:g} s")
        _sleep(min(poll_s, timeout_s - seconds), waited)


def _sleep(seconds: float, waited: Waited) -> None:
    """Sleep in steps that the clock of the wait counts fully."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, STEP_MAX_S / 2))
        waited.look()


class _Look:
    """Lists versions only if they may have changed."""

    def __init__(self, stamp: Callable[[], object], listed: Callable[[], list[int]]) -> None:
        self._stamp = stamp
        self._list = listed
        self._last: object = None
        self._changed_at = 0.0
        self._versions: list[int] = []

    def versions(self) -> list[int]:
        stamp, now = self._stamp(), time.monotonic()
        if stamp is None or stamp != self._last:
            self._last, self._changed_at = stamp, now
        elif now - self._changed_at > _STAMP_S:
            return self._versions
        self._versions = self._list()
        return self._versions
