"""A clock for waits, which stands still while the process is stopped."""

from __future__ import annotations

import time

__all__ = ["STEP_MAX_S", "Waited"]

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
