"""Threads that close arrays of a cache which were lost, as when a signal came before their `with`.

The garbage collector may find such an array in the middle of a call, so another thread closes it.
Whoever closes the cache afterwards waits for that thread: to him the array is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flashwarp import endings
from flashwarp.config import time_limit_s


class Closings:
    """The threads of one cache. Any thread may call."""

    def __init__(self) -> None:
        self._threads: list[endings.Thread] = []

    def start(self, close: Callable[[], object]) -> None:
        """Call a function in a thread; raises RuntimeError if none can be started."""

        def run() -> None:
            try:
                close()
            finally:
                self._threads.remove(thread)

        thread = endings.Thread(run, "flashwarp closing", daemon=False)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)
            raise

    def wait(self) -> None:
        """Wait until all that were started have ended, but no longer than the time limit."""
        for thread in tuple(self._threads):
            if thread is not threading.current_thread():
                thread.join(time_limit_s())
