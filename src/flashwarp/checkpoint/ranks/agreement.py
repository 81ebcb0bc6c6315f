"""How ranks agree on a version, by files in the folder that they share; torch is not needed.

A version has two steps: `PREPARED`, its bytes and its manifest are on the medium, and `PUBLISHED`,
its manifest has its name. For each step a rank votes by an empty file. The step is settled once, by
a file that only one process can make: in favour by who has seen all votes of living processes, or
against by a rank that has failed, or that knows that another one will not vote. All follow what was
settled. So no rank publishes a version that another one could not prepare. If a step is settled
against the version, the ranks begin another round.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashwarp._waiting import Waited
from flashwarp.checkpoint.directory.names import listed
from flashwarp.checkpoint.ranks.records import FOLDER, Records
from flashwarp.checkpoint.ranks.sessions import Sessions
from flashwarp.errors import CheckpointError, RankError
from flashwarp.storage import files

PREPARED, PUBLISHED = "prepared", "published"

_ROUNDS_MAX = 9999
_OTHERS_SETTLE_S = 1.0
"""Rank 0 settles what all have voted for; after this time any rank does."""

LOOK_S = 0.25
"""How often a rank looks at the votes of others."""

_REASON_BYTES_MAX = 1000

# VERSION.ROUND.STEP.RANK.SESSION and VERSION.ROUND.STEP.settled. What is complete has a folder of
# its own, because it stays, and the other one is listed again and again.
_VOTE = re.compile(r"([0-9]{19})\.([0-9]{4})\.([a-z]+)\.([0-9]{5})\.([0-9a-f]{16})")
_SETTLED = re.compile(r"([0-9]{19})\.([0-9]{4})\.([a-z]+)\.settled")


@dataclass(frozen=True)
class Outcome:
    """What was settled. `rank` and `reason` say who could not write the version, and why."""

    ok: bool
    rank: int = 0
    reason: str = ""


def rank_error(what: str, outcome: Outcome) -> RankError:
    """Make the error of a version that was settled against."""
    return RankError(
        f"{what} is committed by no rank, because rank {outcome.rank} failed: {outcome.reason}",
        outcome.rank,
        outcome.reason,
    )


class Attempt(ABC):
    """One round of one version, seen from one rank, wherever its votes are."""

    def __init__(self, rank: int, name: str, version: int, number: int) -> None:
        self._rank = rank
        self._name = name
        self.what = f"version {version} of {name!r}"
        self.version = version
        self.number = number
        self._clock = Waited()
        self._looked = -LOOK_S
        self.missing: list[int] = []  # ranks that had not voted at the last look

    @property
    def waited_s(self) -> float:
        """Seconds since the last vote of this rank."""
        return self._clock.look()

    @abstractmethod
    def vote(self, step: str) -> None:
        """Vote for a step."""

    @abstractmethod
    def outcome(self, step: str) -> Outcome | None:
        """Return what was settled, after settling it if that is possible now; None: wait on."""

    @abstractmethod
    def settled(self, step: str) -> Outcome | None:
        """Return what was settled; None if nothing was."""

    @abstractmethod
    def settle(self, step: str, outcome: Outcome) -> Outcome:
        """Settle a step, unless another process has; return what is settled."""

    @abstractmethod
    def end(self) -> None:
        """Remove the votes of this rank."""

    def fail(self, reason: str) -> None:
        """Let all ranks know that this one cannot write the version."""
        outcome = Outcome(False, self._rank, reason)
        if self.settle(PREPARED, outcome).ok:
            self.settle(PUBLISHED, outcome)
        self.end()

    def check(self) -> None:
        """Raise RankError if another rank has failed; looks four times a second at most."""
        waited = self._clock.look()
        if waited - self._looked >= LOOK_S:
            self._looked = waited
            found = self.settled(PREPARED)
            if found is not None and not found.ok:
                raise rank_error(self.what, found)


class Agreement(Records, ABC):
    """The ranks, seen from one of them, wherever their votes are.

    `timeout_s` limits how long a rank waits for the votes of others after its own.
    """

    def __init__(self, path: Path, rank: int, ranks: int, timeout_s: float) -> None:
        super().__init__(path, ranks)
        self.rank = rank
        self.timeout_s = timeout_s

    @abstractmethod
    def begin(self, name: str, version: int) -> Attempt:
        """Begin a round for a version: the first that is not settled."""

    @abstractmethod
    def failures(self, name: str) -> dict[int, Outcome]:
        """Return versions that another rank has given up, each round once."""

    @abstractmethod
    def complete(self, name: str) -> set[int]:
        """Return the versions that all ranks have published."""

    @abstractmethod
    def others(self, name: str, version: int) -> Iterable[int]:
        """Return the other ranks whose parts of a version are in this folder."""


class Group(Agreement):
    """The ranks of one folder. A process that is not `writable` does not vote, it only looks."""

    def __init__(
        self, path: Path, rank: int, ranks: int, timeout_s: float, *, writable: bool = True
    ) -> None:
        super().__init__(path, rank, ranks, timeout_s)
        self.sessions = Sessions(path, rank, ranks)
        self._reported: dict[str, set[str]] = {}
        if writable:
            self._remove_votes()
            self.sessions.join()

    def complete(self, name: str) -> set[int]:
        """Return the versions that all ranks have published."""
        return self.recorded(name)

    def others(self, name: str, version: int) -> Iterable[int]:
        """Return the other ranks whose parts of a version are in this folder."""
        return (rank for rank in range(self.ranks_of(name, version)) if rank != self.rank)

    def begin(self, name: str, version: int) -> FileAttempt:
        """Begin a round for a version: the first that is not settled."""
        folder = self.make_folder(name)
        self.forget(name, version)
        number = 0
        for each in listed(folder):
            match = _SETTLED.fullmatch(each)
            if match and int(match[1]) == version:
                attempt = FileAttempt(self, name, version, int(match[2]))
                # Agreed by all, and this process has no part in it: its forerunner had.
                prepared = attempt.settled(PREPARED)
                if prepared is not None and prepared.ok:
                    attempt.settle(PUBLISHED, Outcome(False, self.rank, "was started again"))
                number = max(number, attempt.number + 1)
        if number > _ROUNDS_MAX:
            raise CheckpointError(
                f"version {version} of {name!r} has failed {number} times: discard it"
            )
        return FileAttempt(self, name, version, number)

    def failures(self, name: str) -> dict[int, Outcome]:
        """Return versions that another rank has given up, each round once."""
        found: dict[int, Outcome] = {}
        folder = self.folder(name)
        settled = {each for each in listed(folder) if _SETTLED.fullmatch(each)}
        new = settled - self._reported.get(name, set())
        self._reported[name] = settled
        for each in new:
            record = _Record.read(folder / each)
            if record is None or record.outcome.ok or record.by == self.rank:
                continue
            # What a process of an earlier run has settled concerns nobody now.
            if self.sessions.known(record.by, record.session):
                found[int(each.partition(".")[0])] = record.outcome
        return found

    def _remove_votes(self) -> None:
        """Remove the votes of an earlier process of this rank."""
        for name in listed(self._path):
            folder = self._path / name / FOLDER
            for each in listed(folder):
                match = _VOTE.fullmatch(each)
                if match and int(match[4]) == self.rank:
                    _remove(folder / each)


class FileAttempt(Attempt):
    """A round whose votes are files."""

    def __init__(self, group: Group, name: str, version: int, number: int) -> None:
        super().__init__(group.rank, name, version, number)
        self._group = group
        self._folder = group.folder(name)
        self._stem = f"{version:019d}.{number:04d}"

    def vote(self, step: str) -> None:
        """Vote for a step; raises PathError."""
        path = self._folder / self._vote_name(step)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise files.write_error(error, str(path)) from error
        self._clock, self._looked = Waited(), -LOOK_S

    def outcome(self, step: str) -> Outcome | None:
        """Return what was settled, after settling it if that is possible now; None: wait on."""
        waited = self._clock.look()
        found = listed(self._folder)
        if f"{self._stem}.{step}.settled" in found:
            return self.settled(step) or Outcome(False, self._rank, "lost its record")
        votes = self._votes(found, step)
        self.missing = [rank for rank in range(self._group.ranks) if rank not in votes]
        if not self.missing and self._rank and waited < _OTHERS_SETTLE_S:
            return None
        if self.missing and waited - self._looked < LOOK_S:
            return None
        self._looked = waited
        return self._decide(step, found, waited)

    def _decide(self, step: str, found: list[str], waited: float) -> Outcome | None:
        sessions = self._group.sessions
        votes, before = self._votes(found, step), self._votes(found, PREPARED)
        for rank in range(self._group.ranks):
            if sessions.ended(rank):
                return self.settle(step, Outcome(False, rank, "its process has ended"))
            session = sessions.alive(rank)
            if step == PUBLISHED and session != before.get(rank):
                return self.settle(step, Outcome(False, rank, "its process was started again"))
            if rank in votes and session != votes[rank]:
                self.missing.append(rank)  # the vote of an earlier run
        if not self.missing:
            return self._agree(step)
        if waited < self._group.timeout_s:
            return None
        reason = f"has not written it within {self._group.timeout_s:g} s"
        return self.settle(step, Outcome(False, self.missing[0], reason))

    def _agree(self, step: str) -> Outcome:
        if step == PREPARED:
            return self.settle(step, Outcome(True))
        # The record comes first: once the step is settled, any rank may say that it is durable.
        self._group.write_record(self._name, self.version)
        outcome = self.settle(step, Outcome(True))
        if not outcome.ok:
            self._group.forget(self._name, self.version)
        return outcome

    def settle(self, step: str, outcome: Outcome) -> Outcome:
        """Settle a step, unless another process has; return what is settled."""
        record = _Record(outcome, self._rank, self._group.sessions.own)
        if record.make(self._folder / f"{self._stem}.{step}.settled"):
            return outcome
        return self.settled(step) or outcome

    def settled(self, step: str) -> Outcome | None:
        """Return what was settled; None if nothing was."""
        found = _Record.read(self._folder / f"{self._stem}.{step}.settled")
        return None if found is None else found.outcome

    def end(self) -> None:
        """Remove the votes of this rank; the last one of a complete version, what was settled."""
        for step in (PREPARED, PUBLISHED):
            _remove(self._folder / self._vote_name(step))
        found = [each for each in listed(self._folder) if each.startswith(f"{self.version:019d}.")]
        complete = self._group.record(self._name, self.version).exists()
        if complete and not any(map(_VOTE.fullmatch, found)):
            for each in filter(_SETTLED.fullmatch, found):
                _remove(self._folder / each)

    def _votes(self, found: list[str], step: str) -> dict[int, str]:
        begin = f"{self._stem}.{step}."
        matches = (_VOTE.fullmatch(each) for each in found if each.startswith(begin))
        return {int(match[4]): match[5] for match in matches if match}

    def _vote_name(self, step: str) -> str:
        return f"{self._stem}.{step}.{self._rank:05d}.{self._group.sessions.own}"


@dataclass(frozen=True)
class _Record:
    """What was settled, and by whom: the text of a symbolic link.

    symlink(2) makes name and text at once, and fails if the name is taken. A short text needs no
    block, so that a rank can say that its disk is full.
    """

    outcome: Outcome
    by: int
    session: str

    def make(self, path: Path) -> bool:
        """Make the link; return False if it is there."""
        found = self.outcome
        text = f"{int(found.ok)} {found.rank} {self.by} {self.session}"
        reason = found.reason.replace("\0", " ").encode()[:_REASON_BYTES_MAX]
        for each in (f"{text} ".encode() + reason, text.encode()):
            try:
                os.symlink(each, os.fsencode(path))
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT) and len(each) > len(text):
                    continue
                raise files.write_error(error, str(path)) from error
            return True
        raise AssertionError("unreachable")

    @staticmethod
    def read(path: Path) -> _Record | None:
        """Return what a link says; None if it is not there."""
        try:
            words = os.readlink(path).split(" ", 4)
            reason = words[4] if len(words) > 4 else "gave no reason: its disk may be full"
            return _Record(Outcome(words[0] == "1", int(words[1]), reason), int(words[2]), words[3])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # the next process of the rank removes it
        path.unlink()
