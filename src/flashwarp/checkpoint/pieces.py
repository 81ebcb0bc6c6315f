"""Pieces of versions on their way from and to storage, several at a time.

The threads of a crew move them, and so does each thread that waits for pieces of its own: if no
other thread has time, or can be started, it moves all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from flashwarp import endings
from flashwarp._waiting import STEP_MAX_S, Waited
from flashwarp.checkpoint.workers import Crew
from flashwarp.errors import WaitTimeout

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
    def __init__(self, act: Callable[[], None], ended: endings.Condition) -> None:
        self.act = act
        self.ended = ended  # of all pieces of one move
        self.over = False
        self.failure: BaseException | None = None


class Pieces:
    """Moves the pieces of several versions. Any thread may call.

    If no piece ends within `limit_s`, the crew is broken.
    """

    def __init__(self, crew: Crew, limit_s: float) -> None:
        self._crew = crew
        self._limit_s = limit_s
        self._room = endings.Condition(crew.lock)
        self._queue: deque[_Piece] = deque()
        self._running = 0
        self._ended = 0
        self._wake = crew.add(self._next, AT_A_TIME)

    def move(
        self,
        jobs: Iterable[tuple[int, Callable[[], None]]],
        wanted: Callable[[], bool],
        ending: Callable[[], None] = lambda: None,
    ) -> bool:
        """Move pieces, each with its size; return False if they are not wanted any more.

        When it returns or raises, nobody touches their memory, also if a signal ended it. The one
        exception is WaitTimeout, after which the checkpointer is broken and frees nothing that a
        thread may use. `ending` is called when the last one is on its way.
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
        ended = endings.Condition(self._crew.lock)
        last: _Piece | None = None
        try:
            for size, act in jobs:
                if not wanted():
                    return False
                if size < _POOLED_BYTES_MIN:
                    act()
                    continue
                _raise_failed(mine)
                if last is not None:
                    self._help(mine, partial(self._enter, last), self._room)
                    mine.append(last)
                last = _Piece(act, ended)
            if last is not None:
                # Its caller moves it, so nobody is woken for it.
                self._help(mine, partial(self._enter, last, wakes=False), self._room)
                mine.append(last)
            ending()
            self._end(mine, ended)
            _raise_failed(mine)
        finally:
            if mine:
                with self._crew.lock:
                    self._withdraw(mine)
                self._end(mine, ended)
        return True

    def _end(self, mine: deque[_Piece], ended: endings.Condition) -> None:
        if mine:
            self._help(mine, lambda: all(each.over for each in mine), ended)

    def _help(
        self, mine: deque[_Piece], done: Callable[[], bool], changed: endings.Condition
    ) -> None:
        """Move pieces of one's own until `done`, which is asked under the lock.

        Raises WaitTimeout if no piece ends in time, of whichever version.
        """
        clock, seen = Waited(), -1
        while True:
            with self._crew.lock:
                if done():
                    return
                if seen != self._ended:
                    clock, seen = Waited(), self._ended
                if clock.look() >= self._limit_s:
                    raise self._stalled(mine)
                # While more are to come, other threads move them: they would empty the queue before
                # this one has moved a piece.
                own = next((each for each in self._queue if each in mine), None)
                job = self._begin(own) if changed is not self._room or self._crew.busy else None
                if job is None:
                    changed.wait(STEP_MAX_S)
            if job is not None:
                job()

    def _withdraw(self, mine: deque[_Piece]) -> None:
        for each in [each for each in mine if each in self._queue]:
            self._queue.remove(each)
            each.over = True

    def _stalled(self, mine: deque[_Piece]) -> WaitTimeout:
        """Give pieces up that other threads still move, and break the checkpointer."""
        error = WaitTimeout(
            f"{self._running} pieces of versions are being moved to or from storage, and none of "
            f"them has ended for {self._limit_s:g} s: the storage does not answer"
        )
        self._withdraw(mine)
        mine.clear()
        self._crew.broken(error)
        return error

    def _enter(self, piece: _Piece, *, wakes: bool = True) -> bool:
        if len(self._queue) + self._running >= QUEUED_MAX:
            return False
        self._queue.append(piece)
        if wakes:
            self._wake()
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
            self._ended += 1
            piece.over = True
            piece.ended.notify()
            self._room.notify()
            if self._queue:
                self._wake()


def _raise_failed(mine: deque[_Piece]) -> None:
    """Forget pieces that are over; raise what the first of them has failed with."""
    while mine and mine[0].over:
        failure = mine.popleft().failure
        if failure is not None:
            raise failure
