"""Progress of what may last: a line on a terminal, with rate and remaining time.

A load shows it by itself, or calls the user's function. Other calls of the library show it only if
FLASHWARP_PROGRESS asks for it, as the command line does.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

from flashwarp import config
from flashwarp.errors import ArgumentError

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes that have arrived, and all bytes."""

# What ends sooner needs no line.
_SILENT_S = 1.0
_EVERY_S = 0.2
_WIDTH = 24
_GB = "GB"


def progress_for(given: bool | Progress | None, what: str) -> Progress:
    """Return what shows progress. None: a line, if stderr is a terminal and the load lasts."""
    if callable(given):
        return given
    if given is not None and not isinstance(given, bool):
        raise ArgumentError(f"progress={given!r} is neither True, False, None nor callable")
    shown = _on_terminal() if given is None else given
    return _Line(what, _GB, 0.0 if given else _SILENT_S) if shown else _nothing


def counting(what: str, total: int, unit: str = _GB) -> Callable[[int], None]:
    """Return what counts work that is done, and shows a line if that is asked for.

    Work without a `unit` is bytes. A total of 0 is not known; then 0 more is the end.
    """
    if not config.current("progress").progress or not _on_terminal():
        return lambda _: None
    line, done = _Line(what, unit, _SILENT_S), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        line(done, total if more else done)

    return count


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _nothing(done: int, total: int) -> None:
    pass


class _Line:
    """One line, written over again."""

    def __init__(self, what: str, unit: str, silent_s: float) -> None:
        self._what = what
        self._unit = unit
        self._begin = time.monotonic()
        self._next = self._begin + silent_s
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        ended = done >= total and (total != 0 or done == 0)
        if now < self._next and not (ended and self._shown):
            return
        self._next, self._shown = math.inf if ended else now + _EVERY_S, not ended
        rate = done / max(now - self._begin, 1e-9)
        text = f"{self._what} {self._amount(done)}, {self._amount(rate)}/s"
        if total:
            part = done / total
            left = f", {_duration((total - done) / rate)} left" if rate and not ended else ""
            text = (
                f"{self._what} [{'#' * int(part * _WIDTH):<{_WIDTH}}] {part:4.0%} of "
                f"{self._amount(total)}, {self._amount(rate)}/s{left}"
            )
        # Erases what is left of a longer one.
        print(f"\r{text}\x1b[K", end="\n" if ended else "", file=sys.stderr, flush=True)

    def _amount(self, count: float) -> str:
        return f"{count / 1e9:.2f} GB" if self._unit == _GB else f"{count:,.0f} {self._unit}"


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{seconds:.0f} s" if minutes == 0 else f"{minutes} min {seconds % 60:.0f} s"
