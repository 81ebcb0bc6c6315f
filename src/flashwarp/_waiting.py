"""What waits share: a clock that stands still while the process is stopped, and a word to users."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from flashwarp import endings

__all__ = ["SLOW_S", "STEP_MAX_S", "Waited", "saying_if_slow", "until"]

SLOW_S = 1.0
"""Seconds after which a user should know what the program is doing."""

STEP_MAX_S = 0.1
"""The longest time that counts between two looks; callers look more often."""


class Waited:
    """A clock of one wait, which starts now.

    The system's clock runs on while a process is stopped (Ctrl-Z, a debugger, a suspended machine).
    So each step from look to look counts for at most `STEP_MAX_S`, and a limit in seconds is a
    limit of the seconds in which the process ran.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float:
        """Return the seconds that the process has waited."""
        now = time.monotonic()
        self._seconds += min(now - self._last, STEP_MAX_S)
        self._last = now
        return self._seconds


# A wait polls without sleeping for this long: most waits of the library end within it.
_POLL_S = 100e-6
# Then it sleeps a fiftieth of the time already waited, so it adds at most 2 % to any wait.
_SLEEP_SHARE = 0.02
_SLEEP_MAX_S = 1e-3


def until(done: Callable[[], bool], timeout_s: float) -> float | None:
    """Poll `done` with growing sleeps, for at most `timeout_s` seconds in which the process ran.

    Returns None once it is done, and the seconds waited if the time is over.
    """
    clock = Waited()
    while not done():
        waited = clock.look()
        if waited >= timeout_s:
            return waited
        if waited > _POLL_S:
            time.sleep(min(waited * _SLEEP_SHARE, _SLEEP_MAX_S))
    return None


@contextlib.contextmanager
def saying_if_slow(log: logging.Logger, doing: str, *arguments: object) -> Iterator[None]:
    """Log a warning, while the work goes on, once it has taken `SLOW_S`."""
    over = endings.Event()

    def say() -> None:
        if not over.wait(SLOW_S):
            log.warning(f"{doing} takes longer than %g s", *arguments, SLOW_S)

    endings.Thread(say, "flashwarp slow").start()
    try:
        yield
    finally:
        over.set()
