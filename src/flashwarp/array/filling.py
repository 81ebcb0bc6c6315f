"""Lines of a shared cache on a GPU that its clients were given past it, on their way into it.

Host threads of the owner answer from the file what its readers' clients ask for, and wait for no
turn of the GPU (see `answering`). The lines enter the cache behind the answers, by launches for
which no client waits.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flashwarp import config, endings
from flashwarp.device import Device
from flashwarp.errors import FlashwarpError
from flashwarp.launch.operands import Index

_log = logging.getLogger(__name__)

# Lines of one launch, in so many bytes of memory on the GPU, which nobody reads.
_LINES = 1024
_BYTES = 4 << 20

# Lines that wait at most. If more come, it is faster than launches are made: those that are asked
# for often come again.
_WAITING_MAX = 1 << 16

Lines = npt.NDArray[np.int64]


class Export(Protocol):
    """An array whose lines enter the cache."""

    def act(self, act: Callable[[], None]) -> None:
        """Act on the array, unless it is closed."""

    def move(self, verb: str, row_bytes: int, chosen: range | Index, buffer: int = 0) -> None:
        """Launch the moving of rows of so many bytes, and wait."""


class Filling:
    """Fills lines in a thread of its own, until it is closed.

    Parameters
    ----------
    device : Device
        A GPU.
    lines, line_bytes : int
        Of the cache.
    """

    def __init__(self, device: Device, lines: int, line_bytes: int) -> None:
        self._line = line_bytes
        self._most = max(1, min(_WAITING_MAX, lines // 2))
        # Few at once, which leave the cache to others.
        self._at_once = max(1, min(_LINES, _BYTES // line_bytes, lines // 4))
        self._memory = device.allocate(self._at_once * line_bytes)
        self._indices = device.allocate_host(8 * self._at_once)
        self._numbers = self._indices.as_numpy().view(np.int64)
        self._waiting: deque[tuple[Export, Lines]] = deque()
        self._count = 0
        self._guard = endings.Lock()
        self._changed = endings.Event()
        self._closed = False
        self._thread = endings.Thread(self._fill_all, "flashwarp sharing fills")
        self._thread.start()

    def add(self, export: Export, lines: Lines) -> None:
        """Let whole lines of an array enter the cache, counted from its first; waits for nothing.

        They are forgotten if too many wait already.
        """
        with self._guard:
            if self._count + len(lines) > self._most:
                return
            self._count += len(lines)
            self._waiting.append((export, lines))
        self._changed.set()

    def _fill_all(self) -> None:
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            while self._waiting and not self._closed:
                self._fill(*self._next())

    def _next(self) -> tuple[Export, Lines]:
        """Take what waits for one array, as much as one launch has room for."""
        export, found = self._waiting.popleft()
        parts, count = [found], len(found)
        while self._waiting and self._waiting[0][0] is export and count < self._at_once:
            parts.append(self._waiting.popleft()[1])
            count += len(parts[-1])
        with self._guard:
            self._count -= count
        return export, np.unique(np.concatenate(parts))

    def _fill(self, export: Export, lines: Lines) -> None:
        for first in range(0, len(lines), self._at_once):
            part = self._numbers[: len(lines[first : first + self._at_once])]
            part[:] = lines[first : first + self._at_once]
            index = Index(self._indices.address, part.shape, 8, "numpy", part)
            move = partial(export.move, "gather", self._line, index, self._memory.address)
            try:
                # Its reader has its rows, or was told why not.
                with contextlib.suppress(FlashwarpError):
                    export.act(move)
            except Exception:
                _log.exception("filling lines for clients")

    def close(self) -> None:
        """End the thread, and forget what waits. May be called twice."""
        self._closed = True
        self._changed.set()
        self._thread.join(config.time_limit_s())
        if not self._thread.is_alive():  # else its launch is yet to end
            self._memory.close()
            self._indices.close()
