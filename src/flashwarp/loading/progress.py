"""Progress of a load: a line on a terminal, or calls of the user's function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeAlias

from flashwarp.errors import ArgumentError

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes that have arrived, and all bytes."""

# A load that ends sooner needs no line.
_SILENT_S = 2.0
_EVERY_S = 0.2
_WIDTH = 24


def progress_for(given: bool | Progress | None, what: str) -> Progress:
    """Return what shows progress. None: a line, if stderr is a terminal and the load lasts."""
    if callable(given):
        return given
    if given is not None and not isinstance(given, bool):
        raise ArgumentError(f"progress={given!r} is neither True, False, None nor callable")
    shown = sys.stderr is not None and sys.stderr.isatty() if given is None else given
    return _Line(what, 0.0 if given else _SILENT_S) if shown else _nothing


def _nothing(done: int, total: int) -> None:
    pass


class _Line:
    """One line, written over again."""

    def __init__(self, what: str, silent_s: float) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._next = self._begin + silent_s
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        ended = done >= total
        if now < self._next and not (ended and self._shown):
            return
        self._next, self._shown = now + _EVERY_S, True
        part = done / total if total else 1.0
        rate = done / max(now - self._begin, 1e-9) / 1e9
        bar = "#" * int(part * _WIDTH)
        text = (
            f"{self._what} [{bar:<{_WIDTH}}] {part:4.0%} of {total / 1e9:.2f} GB, {rate:.2f} GB/s"
        )
        print(f"\r{text}", end="\n" if ended else "", file=sys.stderr, flush=True)
