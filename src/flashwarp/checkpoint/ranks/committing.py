"""Versions of this rank that are on the medium, and wait for the other ranks.

One thread follows all of them, so that a version that waits holds up no other one. It also looks
for versions that other ranks have given up, whatever this rank is doing with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.ranks.agreement import (
    PREPARED,
    PUBLISHED,
    Agreement,
    Attempt,
    Outcome,
    rank_error,
)
from flashwarp.checkpoint.tier import Entry
from flashwarp.checkpoint.workers import Crew
from flashwarp.errors import DamagedVersionError, FlashwarpError, MissingVersionError

_log = logging.getLogger(__name__)

_FAILURES_S = 0.2
"""How often this rank looks whether others have failed: far below the 5 s in which all know."""

# A wait is looked at ever less often, and at most a twentieth longer for that.
_POLL_SHARE, _POLL_S_MIN, _POLL_S_MAX = 0.05, 0.005, 0.25

Ended = Callable[[bool, BaseException | None], None]
"""Takes the end of a write: whether the version is stored, and what it has failed with."""


@dataclass
class _Prepared:
    entry: Entry
    writer: Any
    attempt: Attempt
    ended: Ended
    step: str = PREPARED


class GroupCommits:
    """The jobs of the thread that commits versions together with other ranks."""

    def __init__(self, core: Core, directory: Any, group: Agreement, remote: Any = None) -> None:
        self._core = core
        self._directory = directory
        self.group = group
        self._remote = remote
        self.crew = Crew("ranks", core.mover.crew.lock)
        self._prepared: list[_Prepared] = []
        self._looked_ns = 0

    def begin(self, entry: Entry) -> Attempt:
        """Begin to write a version; what an earlier attempt has left of it is removed."""
        attempt = self.group.begin(*entry.key)
        name, version = entry.key
        # Durably, and before the vote: no manifest of another round can be taken for one of this.
        self._directory.discard_all(name, [version])
        return attempt

    def prepared(self, entry: Entry, writer: Any, attempt: Attempt, ended: Ended) -> None:
        """Take over a version whose bytes are written; `ended` is called once all have agreed."""
        writer.prepare()
        attempt.vote(PREPARED)
        with self._core.changed:
            self._prepared.append(_Prepared(entry, writer, attempt, ended))
            self._core.wake("ranks")

    def waiting(self) -> list[str]:
        """Describe what waits for other ranks; called under the lock."""
        return [
            f"{each.entry} waits for ranks {', '.join(map(str, each.attempt.missing[:8]))}"
            for each in self._prepared
            if each.attempt.missing
        ]

    # In the thread.

    def next_job(self) -> Callable[[], None] | None:
        """Return a look at all that waits; called under the lock."""
        now_ns = self._core.now_ns()
        due = now_ns - self._looked_ns >= _FAILURES_S * 1e9 and bool(self._core.lost())
        if due:
            self._looked_ns = now_ns
        if not due and not self._prepared:
            return None
        return partial(self._look, list(self._prepared), due)

    def _look(self, prepared: list[_Prepared], due: bool) -> None:
        for each in prepared:
            if self._step(each):
                with self._core.changed:
                    self._prepared.remove(each)
        if due:
            self._find_failures()
        with self._core.changed:
            # Polled: files of other processes send no notification that all file systems know.
            if self._prepared:
                waited_s = min(each.attempt.waited_s for each in self._prepared)
                pause_s = min(max(_POLL_SHARE * waited_s, _POLL_S_MIN), _POLL_S_MAX)
                self.crew.rest(pause_s)

    def _step(self, each: _Prepared) -> bool:
        """Go on with a version; return whether it has ended."""
        try:
            return self._go_on(each)
        except (FlashwarpError, OSError) as error:
            self._give_up(each, str(error))
            each.ended(False, error)
            return True

    def _go_on(self, each: _Prepared) -> bool:
        if each.entry.discarded or self._core.closing:
            self._give_up(each, "its program does not need the version any more")
            each.ended(False, None)
            return True
        outcome = each.attempt.outcome(each.step)
        if outcome is None:
            return False
        if not outcome.ok:
            self._take_back(each)
            each.attempt.end()
            each.ended(False, rank_error(str(each.entry), outcome))
            return True
        if each.step == PREPARED:
            each.writer.publish()
            each.attempt.vote(PUBLISHED)
            each.step = PUBLISHED
            return False
        each.attempt.end()
        each.ended(True, None)
        return True

    def _give_up(self, each: _Prepared, reason: str) -> None:
        try:
            each.attempt.fail(reason)
            self._take_back(each)
        except (FlashwarpError, OSError) as error:
            _log.warning("%s cannot be taken back: %s", each.entry, error)

    def _take_back(self, each: _Prepared) -> None:
        each.writer.abort()
        if each.writer.committed:
            self._directory.discard_all(each.entry.key[0], [each.entry.key[1]])

    def _find_failures(self) -> None:
        with self._core.changed:
            names = {entry.key[0] for entry in self._core.lost()}
        for name in sorted(names):
            try:
                found = self.group.failures(name)
            except (FlashwarpError, OSError) as error:
                _log.warning("the votes on versions of %r cannot be read: %s", name, error)
                continue
            for version, outcome in found.items():
                self._note(name, version, outcome)

    def _note(self, name: str, version: int, outcome: Outcome) -> None:
        core = self._core
        with core.changed:
            entry = core.entries.get((name, version))
            if entry is not None and not entry.stored and entry.failure is None:
                core.failed_now(entry, rank_error(str(entry), outcome))
                core.wake()

    def close(self) -> None:
        """Give up what waits. May be called twice; the thread has ended."""
        for each in self._prepared:
            self._give_up(each, "its checkpointer was closed")
            each.ended(False, None)
        self._prepared.clear()

    # Versions that all ranks have.

    def check_all(self, name: str, version: int, *, verify: bool) -> None:
        """Raise unless all ranks that have written a version still have it, here or remotely."""
        for rank in self.group.others(name, version):
            try:
                self._check(self._directory, name, version, rank, verify)
            except (MissingVersionError, DamagedVersionError):
                if self._remote is None:
                    raise
                self._check(self._remote, name, version, rank, verify)

    def _check(self, place: Any, name: str, version: int, rank: int, verify: bool) -> None:
        with place.open(name, version, rank=rank) as reader:
            if verify:
                reader.verify()

    def discard(self, name: str, version: int) -> None:
        """Remove the record of a version that no rank has any more."""
        for rank in range(self.group.ranks):
            try:
                self._directory.open(name, version, rank=rank).close()
            except MissingVersionError:
                continue
            except FlashwarpError:
                return
            return
        self.group.forget(name, version)
