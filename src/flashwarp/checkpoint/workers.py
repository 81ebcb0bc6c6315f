"""Background threads of a checkpointer: each does one kind of work until the checkpointer ends.

A worker takes a job under the lock, does it without the lock, and notes its outcome under the lock.
An error of a job belongs to its version. An error of the worker itself breaks the checkpointer, and
every later call raises it: no error of a background thread is lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flashwarp import endings
from flashwarp._waiting import STEP_MAX_S
from flashwarp.checkpoint.core import Core

__all__ = ["Worker"]

_log = logging.getLogger(__name__)


class Worker:
    """One thread, which does jobs as long as there are some.

    Parameters
    ----------
    core : Core
        The checkpointer's state.
    name : str
        Of the thread.
    role : str
        Which of `core.ROLES`.
    next_job : callable
        Returns a job or None; called under the lock.
    """

    def __init__(
        self,
        core: Core,
        name: str,
        role: str,
        next_job: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._core = core
        self._role = role
        self._next_job = next_job
        self._stop = False
        self.thread = threading.Thread(
            target=self._run, name=f"flashwarp-checkpoint-{name}", daemon=True
        )
        endings.start(self.thread)

    def stop(self) -> None:
        """End the thread after its present job; returns at once."""
        with self._core.changed:
            self._stop = True
            self._core.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        core = self._core
        try:
            while True:
                with core.changed:
                    job = self._wait_for_job()
                if job is None:
                    return
                job()
        except BaseException as error:
            _log.exception("a background thread of the checkpointer has failed")
            with core.changed:
                core.broken = core.broken or error
                core.wake()

    def _wait_for_job(self) -> Callable[[], None] | None:
        while not self._stop:
            job = self._next_job()
            if job is not None:
                return job
            # Most jobs come with a notification; some, such as retries, with time.
            self._core.rest(self._role, STEP_MAX_S)
        return None
