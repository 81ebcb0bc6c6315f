"""Progress of the demo: one line a step, with the seconds that it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Steps"]

_WIDTH = 60


class Steps:
    """Writes each step to a stream: its name when it begins, its seconds when it is done."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show one step; steps do not nest."""
        self._write(f"  {what + ' ':.<{_WIDTH}} ")
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self._write("\n")
            raise
        self._write(f"{time.perf_counter() - start:4.1f} s\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            print(text, end="", file=self._stream, flush=True)
