"""Pieces of versions on their way from and to storage, several at a time.

The threads of a crew move them, and so does each thread that waits for pieces of its own: if no
other thread has time, or can be started, it moves all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from flashwarp import endings
from flashwarp._waiting import STEP_MAX_S
from flashwarp.checkpoint.workers import Crew

__all__ = ["AT_A_TIME", "QUEUED_MAX", "STORAGE_THREADS", "Pieces"]

AT_A_TIME = 8
"""How many are moved at a time: one at a time leaves the disk idle between two of them."""

QUEUED_MAX = AT_A_TIME + 2
"""Of all versions, so that no thread waits for its next piece. What is queued is written before a
flush can let reads go first."""

STORAGE_THREADS = AT_A_TIME + 2
"""How many threads of a checkpointer read and write storage: two of them begin what comes next."""

_POOLED_BYTES_MIN = 1 << 20
"""A smaller piece is moved before another thread has begun to."""


class _Piece:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.ended = False
        self.failure: BaseException | None = None


class Pieces:
    """Moves the pieces of several versions. Any thread may call.

    Parameters
    ----------
    crew : Crew
        Its threads help.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._ended = endings.Condition(crew.lock)
        self._queue: deque[_Piece] = deque()
        self._running = 0
        crew.add(self._next, AT_A_TIME)

    def move(
        self,
        jobs: Iterable[tuple[int, Callable[[], None]]],
        wanted: Callable[[], bool],
        ending: Callable[[], None] = lambda: None,
    ) -> bool:
        """Move pieces, each with its size; return False if they are not wanted any more.

        When it returns or raises, nobody touches their memory, also if a signal ended it. `ending`
        is called when the last one is on its way.
        """
        stopped: list[bool] = []

        def goes_on() -> bool:
            return not stopped and wanted()

        move = partial(self._move, jobs, goes_on, ending)
        return endings.aside(move, partial(stopped.append, True))

    def _move(
        self,
        jobs: Iterable[tuple[int, Callable[[], None]]],
        wanted: Callable[[], bool],
        ending: Callable[[], None],
    ) -> bool:
        mine: deque[_Piece] = deque()
        try:
            for size, act in jobs:
                if not wanted():
                    return False
                if size < _POOLED_BYTES_MIN:
                    act()
                    continue
                _raise_failed(mine)
                mine.append(_Piece(act))
                self._help(mine, partial(self._enter, mine[-1]))
            ending()
            self._help(mine, lambda: all(each.ended for each in mine))
            _raise_failed(mine)
        finally:
            with self._crew.lock:
                for each in [each for each in mine if each in self._queue]:
                    self._queue.remove(each)
                    each.ended = True
            self._help(mine, lambda: all(each.ended for each in mine))
        return True

    def _help(self, mine: deque[_Piece], done: Callable[[], bool]) -> None:
        """Move pieces of one's own until `done`, which is asked under the lock.

        Without a limit: pieces that others move have those of their transfers.
        """
        while True:
            with self._crew.lock:
                if done():
                    return
                own = next((each for each in self._queue if each in mine), None)
                job = self._begin(own)
                if job is None:
                    self._ended.wait(STEP_MAX_S)
            if job is not None:
                job()

    def _enter(self, piece: _Piece) -> bool:
        if len(self._queue) + self._running >= QUEUED_MAX:
            return False
        self._queue.append(piece)
        self._crew.wake()
        return True

    def _next(self) -> Callable[[], None] | None:
        return self._begin(self._queue[0] if self._queue else None)

    def _begin(self, piece: _Piece | None) -> Callable[[], None] | None:
        if piece is None or self._running >= AT_A_TIME:
            return None
        self._queue.remove(piece)
        self._running += 1
        return partial(self._run, piece)

    def _run(self, piece: _Piece) -> None:
        try:
            piece.act()
        except BaseException as error:  # whoever waits for the piece raises it
            piece.failure = error
        with self._crew.lock:
            self._running -= 1
            piece.ended = True
            self._ended.notify_all()
            if self._queue:
                self._crew.wake()


def _raise_failed(mine: deque[_Piece]) -> None:
    """Forget pieces that have ended; raise what the first of them has failed with."""
    while mine and mine[0].ended:
        failure = mine.popleft().failure
        if failure is not None:
            raise failure
