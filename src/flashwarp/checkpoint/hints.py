"""The restore queue: in which order the user will restore versions, as far as the user has said.

Hints are advice. They are appended at any time, before or after their versions exist, and never
revoked; restores may deviate from them. A hint that restores keep passing by loses its pin, so that
wrong hints cannot fill a cache for ever. `ScoreCard` says afterwards what the hints were worth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from flashwarp.errors import ArgumentError

HINTS_MAX = 1 << 20
"""Hints that may be open at a time: about 200 MiB of host memory."""

PASSED_MAX = 8
"""After so many restores of later hints a hint loses its pin. Reads that are only out of order, as
those of a few threads, deviate by less; and a cache rarely has room for more wrong versions."""


@dataclass
class Hint:
    """One entry of the queue."""

    number: int  # its place; later hints have larger numbers, and a number never changes
    key: Hashable  # the version
    passed: int = 0  # restores of later hints, or without a hint, since it was the next one


@dataclass(frozen=True)
class ScoreCard:
    """What hints were worth.

    Attributes
    ----------
    hints : int
        All that were given.
    honoured : int
        Hints whose versions were restored after them: ``useful + late``.
    useful : int
        Honoured hints whose versions were in the fastest cache when their restores came.
    late : int
        Honoured hints whose versions were not there yet.
    wrong : int
        Hints that no restore followed: given up, of discarded versions, or left at the end.
    open : int
        Hints that are still waiting for their restores.
    out_of_order : int
        Honoured hints whose restores came before those of earlier hints.
    unhinted : int
        Restores that no hint had named.
    """

    hints: int = 0
    honoured: int = 0
    useful: int = 0
    late: int = 0
    wrong: int = 0
    open: int = 0
    out_of_order: int = 0
    unhinted: int = 0


class RestoreQueue:
    """Hints in the order of expected restores. Not thread-safe: the checkpointer has the lock.

    A hint that `passed_max` restores have passed by is given up.

    Examples
    --------
    >>> queue = RestoreQueue()
    >>> for version in (3, 2, 1):
    ...     _ = queue.enqueue(version)
    >>> _ = queue.restored(3, ready=True)
    >>> [hint.key for hint in queue.upcoming()], queue.card().useful
    ([2, 1], 1)
    """

    def __init__(self, hints_max: int = HINTS_MAX, passed_max: int = PASSED_MAX) -> None:
        self._hints_max = hints_max
        self._passed_max = passed_max
        self._next = 0
        self._open: dict[int, Hint] = {}  # by number, in the order of the queue
        self._by_key: dict[Hashable, deque[int]] = {}
        self._given_up: set[int] = set()
        self._useful = self._late = self._wrong = self._out_of_order = self._unhinted = 0

    def __len__(self) -> int:
        return len(self._open)

    def enqueue(self, key: Hashable) -> Hint:
        """Append a hint; its version need not exist."""
        if len(self._open) >= self._hints_max:
            raise ArgumentError(
                f"{len(self._open)} hints are open, the most that the restore queue holds: restore "
                "the versions that were named, or name fewer at a time"
            )
        hint = self._open[self._next] = Hint(self._next, key)
        self._by_key.setdefault(key, deque()).append(self._next)
        self._next += 1
        return hint

    def number(self, key: Hashable) -> int | None:
        """Return the number of the first hint for a version; None if none is open."""
        for number in self._by_key.get(key, ()):
            if number not in self._given_up:
                return number
        return None

    def upcoming(self) -> Iterator[Hint]:
        """Yield the hints that are open and not given up, in their order."""
        return (hint for number, hint in self._open.items() if number not in self._given_up)

    def restored(self, key: Hashable, *, ready: bool) -> list[Hint]:
        """Note that a restore begins; return the hints that are given up because of it.

        `ready` says whether the version was in the fastest cache already.
        """
        numbers = self._by_key.get(key)
        if not numbers:
            self._unhinted += 1
            return self._pass_by(self._next)
        number = numbers[0]
        self._useful += ready
        self._late += not ready
        self._out_of_order += next(iter(self._open)) < number
        self._close(number)
        return self._pass_by(number)

    def drop(self, key: Hashable) -> None:
        """Close all hints for a version that will not be restored: it was discarded."""
        for number in list(self._by_key.get(key, ())):
            self._wrong += 1
            self._close(number)

    def finish(self) -> ScoreCard:
        """Close what is open: no restore comes any more."""
        self._wrong += len(self._open)
        self._open.clear()
        self._by_key.clear()
        self._given_up.clear()
        return self.card()

    def card(self) -> ScoreCard:
        """Return the counts so far."""
        return ScoreCard(
            hints=self._next,
            honoured=self._useful + self._late,
            useful=self._useful,
            late=self._late,
            wrong=self._wrong,
            open=len(self._open),
            out_of_order=self._out_of_order,
            unhinted=self._unhinted,
        )

    def _pass_by(self, number: int) -> list[Hint]:
        """Count a restore that came before those of the hints before `number`.

        Of a restore without a hint, only the next hint counts it: the others were not next.
        """
        given_up = []
        for hint in self.upcoming():
            if hint.number >= number:
                break
            hint.passed += 1
            if hint.passed >= self._passed_max:
                given_up.append(hint)
            if number == self._next:
                break
        self._given_up.update(hint.number for hint in given_up)
        return given_up

    def _close(self, number: int) -> None:
        hint = self._open.pop(number)
        self._given_up.discard(number)
        numbers = self._by_key[hint.key]
        numbers.remove(number)
        if not numbers:
            del self._by_key[hint.key]
