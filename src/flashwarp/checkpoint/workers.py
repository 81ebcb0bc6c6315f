"""Background threads of a checkpointer, each crew of which does some kinds of jobs until the end.

A thread takes a job under the lock, does it without the lock, and notes its outcome under the lock.
An error of a job belongs to its version. An error of a thread itself breaks the checkpointer, and
every later call raises it: no error of a background thread is lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flashwarp import endings
from flashwarp._waiting import STEP_MAX_S

_log = logging.getLogger(__name__)

Job = Callable[[], None]


@dataclass(eq=False)
class _Kind:
    """One kind of jobs, and how many of it are done at a time."""

    next_job: Callable[[], Job | None]
    most: int
    running: int = 0


class Crew:
    """A few threads with one list of kinds of jobs. Another one starts only while all have a job.

    `lock` guards what the jobs are about; `broken` gets, under the lock, the error of a thread that
    ends by one.
    """

    def __init__(self, name: str, lock: endings.Lock, most: int = 1) -> None:
        self.lock = lock
        self.broken: Callable[[BaseException], object] = lambda _: None
        self._name = f"flashwarp-checkpoint-{name}"
        self._most = most
        self._work = endings.Condition(lock)
        self._kinds: list[_Kind] = []
        self._idle = 0
        self._stop = False
        self._threads: list[endings.Thread] = []

    def add(self, next_job: Callable[[], Job | None], most: int = 1) -> Callable[[], None]:
        """Add a kind of jobs, after those that go first.

        `next_job` returns a job or None, under the lock. Most jobs come with a call of what this
        returns, under the lock, too; some, such as retries, with time.
        """
        kind = _Kind(next_job, most)
        with self.lock:
            self._kinds.append(kind)
            if not self._threads and not self._stop:
                self._start()
        return partial(self._wake, kind)

    def _wake(self, kind: _Kind) -> None:
        """Let one thread look for a job of a kind. Who finds one wakes the next."""
        if self._idle and kind.running < kind.most:
            self._work.notify()

    @property
    def busy(self) -> bool:
        """Whether no thread has time for another job, or can be started."""
        return not self._idle

    def stop(self) -> None:
        """End the threads after their present jobs; returns at once."""
        with self.lock:
            self._stop = True
            self._work.notify_all()

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the end of each thread; return the names of those that have not ended."""
        for each in self._threads:
            if each is not threading.current_thread():
                each.join(timeout_s)
        return [each.name for each in self._threads if each.is_alive()]

    def _start(self) -> None:
        number = f"-{len(self._threads)}" if self._most > 1 else ""
        thread = endings.Thread(self._run, f"{self._name}{number}")
        try:
            thread.start()
        except RuntimeError:  # the process has no thread left, or the interpreter ends
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        kind: _Kind | None = None
        try:
            while True:
                with self.lock:
                    if kind is not None:
                        kind.running -= 1
                    found = self._wait_for_job()
                if found is None:
                    return
                kind, job = found
                del found
                job()
                del job  # it may hold memory
        except BaseException as error:
            _log.exception("a background thread of the checkpointer has failed")
            with self.lock:
                self.broken(error)

    def _wait_for_job(self) -> tuple[_Kind, Job] | None:
        while not self._stop:
            for kind in self._kinds:
                job = kind.next_job() if kind.running < kind.most else None
                if job is None:
                    continue
                kind.running += 1
                if not self._idle and len(self._threads) < self._most:
                    self._start()
                self._wake(kind)
                return kind, job
            self.rest(STEP_MAX_S)
        return None

    def rest(self, seconds: float) -> None:
        """Wait, holding the lock, until there may be a job."""
        self._idle += 1
        try:
            self._work.wait(seconds)
        finally:
            self._idle -= 1
