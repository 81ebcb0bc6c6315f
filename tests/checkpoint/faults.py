"""A directory of checkpoints whose transfers tests stop, and make fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory

WAIT_S = 30.0


class Faults:
    """Switches of a directory: transfers wait, or raise `write_error` and `read_error`.

    `writes` and `reads` count the calls.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reads_open = threading.Event()
        self._reads_open.set()
        self.write_error: Exception | None = None
        self.read_error: Exception | None = None
        self.writes = 0
        self.reads = 0
        self.waiting = threading.Semaphore(0)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()
        self._reads_open.set()

    def release_writes(self) -> None:
        self._open.set()

    def hold_reads(self) -> None:
        self._reads_open.clear()

    def write(self) -> None:
        self.writes += 1
        if not self._open.is_set():
            self.waiting.release()
            assert self._open.wait(WAIT_S)
        error = self.write_error  # once: the test may take it back meanwhile
        if error is not None:
            raise error

    def read(self) -> None:
        self.reads += 1
        if not self._reads_open.is_set():
            self.waiting.release()
            assert self._reads_open.wait(WAIT_S)
        error = self.read_error
        if error is not None:
            raise error

    def until_waiting(self) -> None:
        assert self.waiting.acquire(timeout=WAIT_S)


class _Writer:
    def __init__(self, writer: Any, faults: Faults) -> None:
        self._writer = writer
        self._faults = faults

    def write(self, region: Any, offset: int, buffer: Any) -> None:
        self._faults.write()
        self._writer.write(region, offset, buffer)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class _Reader:
    def __init__(self, reader: Any, faults: Faults) -> None:
        self._reader = reader
        self._faults = faults

    def read_into(self, region: Any, offset: int, buffer: Any) -> None:
        self._faults.read()
        self._reader.read_into(region, offset, buffer)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class FaultyDirectory(Directory):
    """The real directory, whose transfers go through the switches of the test."""

    faults = Faults()

    def begin(self, *arguments: Any, **options: Any) -> Any:
        return _Writer(super().begin(*arguments, **options), self.faults)

    def open(self, *arguments: Any, **options: Any) -> Any:
        return _Reader(super().open(*arguments, **options), self.faults)


Opener = Callable[..., Checkpointer]
"""Opens a checkpointer in the folder of a test; see `conftest.py`."""
