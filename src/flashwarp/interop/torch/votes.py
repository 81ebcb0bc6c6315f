"""How ranks without a common folder agree on a version: by keys of a store of torch.distributed.

The two steps are those of the votes by files. A step is settled by `compare_set`, which only one
process can make first. The store ends with the program, so each rank records what is complete in
its own folder, and all tell each other once, at the beginning, what they have.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from flashwarp import endings
from flashwarp._waiting import Waited
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.ranks.agreement import PREPARED, PUBLISHED, Agreement, Attempt, Outcome
from flashwarp.errors import ArgumentError, CheckpointError, RankError

_JOIN_POLL_S = 0.02
_ROUNDS_MAX = 9999
_REASON_CHARS_MAX = 1000
_T = TypeVar("_T")


class StoreVotes:
    """Lets ranks commit versions together that share no folder, through a store of torch.

    Pass it as ``config={"ranks": n, "votes": flashwarp.torch.StoreVotes(store)}`` on all ranks.

    Parameters
    ----------
    store : torch.distributed.Store
        One that all ranks reach, such as a ``TCPStore``; the votes take keys that begin with
        ``flashwarp/`` and their number.
    number : int
        Tells several checkpointers of one program apart. Each needs its own, and a checkpointer
        that is opened again needs a new one.

    Notes
    -----
    Nobody but the time limit tells a dead rank from a slow one: a rank that has ended is a
    `RankError` on the others after ``timeout_s``. A rank cannot come back alone; start the program
    again, with a new store.

    Examples
    --------
    >>> import tempfile, numpy as np, torch.distributed as dist
    >>> import flashwarp as fw, flashwarp.torch
    >>> votes = flashwarp.torch.StoreVotes(dist.HashStore())
    >>> state = np.zeros(100)
    >>> with fw.Checkpointer(
    ...     tempfile.mkdtemp(), "cpu", 0, "1 MiB", config={"ranks": 1, "votes": votes}
    ... ) as checkpointer:
    ...     checkpointer.protect("state", state)
    ...     checkpointer.checkpoint(0).result(timeout=60)
    0
    """

    def __init__(self, store: Any, number: int = 0) -> None:
        if not isinstance(store, dist.Store):
            raise ArgumentError(f"store={store!r} is no torch.distributed.Store")
        self._store = dist.PrefixStore(f"flashwarp/{number}", store)
        self._lock = endings.Lock()
        self._joined = False

    def join(self, directory: Directory, rank: int, ranks: int, timeout_s: float) -> StoreGroup:
        """Return the group of one checkpointer, once all ranks have said what they have."""
        with self._lock:
            if self._joined:
                raise ArgumentError(
                    "these votes are of another checkpointer: make new ones, with another number"
                )
            self._joined = True
        return StoreGroup(self._store, directory, rank, ranks, timeout_s)


class StoreGroup(Agreement):
    """The ranks of one store."""

    def __init__(
        self, store: Any, directory: Directory, rank: int, ranks: int, timeout_s: float
    ) -> None:
        super().__init__(Path(directory.path), rank, ranks, timeout_s)
        self._store = store
        self._lock = endings.Lock()
        self._read: dict[str, int] = {}
        self._complete = self._meet(directory)

    def _meet(self, directory: Directory) -> dict[str, set[int]]:
        """Tell the other ranks which versions this one has, and return those that all have.

        A version is complete if any rank has its record: then all had published it.
        """
        own = {
            name: [sorted(self.recorded(name)), directory.versions(name)]
            for name in directory.names()
        }
        session = os.urandom(8).hex()
        if not self.put_first(f"rank/{self.rank}", json.dumps([self.ranks, own, session])):
            raise ArgumentError(
                f"rank {self.rank} has voted in this store before: pass another rank, or a number "
                "that no checkpointer has used"
            )
        found = []
        for rank in range(self.ranks):
            found.append(json.loads(self._wait_for(rank)))
            count = found[-1][0]
            if count != self.ranks:
                raise CheckpointError(
                    f"rank {rank} was opened with ranks={count}, and rank {self.rank} with "
                    f"ranks={self.ranks}: open all with the same number"
                )
        complete: dict[str, set[int]] = {}
        for name in {name for _, each, _ in found for name in each}:
            parts = [each.get(name, [[], []]) for _, each, _ in found]
            recorded = {version for part in parts for version in part[0]}
            complete[name] = recorded.intersection(*(part[1] for part in parts))
        return complete

    def _wait_for(self, rank: int) -> str:
        clock, key = Waited(), f"rank/{rank}"
        while not self.has(key):
            if clock.look() >= self.timeout_s:
                reason = f"has not opened its checkpointer within {self.timeout_s:g} s"
                raise RankError(f"rank {rank} {reason}", rank, reason)
            time.sleep(_JOIN_POLL_S)
        return self.get(key)

    # What a checkpointer asks.

    def complete(self, name: str) -> set[int]:
        """Return the versions that all ranks have published."""
        with self._lock:
            return set(self._complete.get(name, ()))

    def others(self, name: str, version: int) -> Iterable[int]:  # noqa: ARG002
        """Return the ranks whose parts are in this folder: none, they told at the beginning."""
        return ()

    def forget(self, name: str, version: int) -> None:
        """Remove the record that a version is complete."""
        super().forget(name, version)
        with self._lock:
            self._complete.get(name, set()).discard(version)

    def note_complete(self, name: str, version: int) -> None:
        """Record, durably, that all ranks have published a version."""
        self.write_record(name, version)
        with self._lock:
            self._complete.setdefault(name, set()).add(version)

    def begin(self, name: str, version: int) -> StoreAttempt:
        """Begin a round for a version: the first that is not settled."""
        self.make_folder(name)
        self.forget(name, version)
        number = 0
        while self.has(_settled(name, version, number, PREPARED)):
            number += 1
            if number > _ROUNDS_MAX:
                raise CheckpointError(
                    f"version {version} of {name!r} has failed {number} times: write another"
                )
        return StoreAttempt(self, name, version, number)

    def failures(self, name: str) -> dict[int, Outcome]:
        """Return versions that another rank has given up, each round once."""
        found: dict[int, Outcome] = {}
        while self.has(f"{name}/failure/{self._read.get(name, 0) + 1}"):
            self._read[name] = number = self._read.get(name, 0) + 1
            by, version, rank, reason = json.loads(self.get(f"{name}/failure/{number}"))
            if by != self.rank:
                found[version] = Outcome(False, rank, reason)
        return found

    def note_failure(self, name: str, version: int, outcome: Outcome) -> None:
        """Let the other ranks find a version that is given up, whatever they do with it."""
        number = self._ask(lambda: int(self._store.add(f"{name}/failures", 1)))
        text = json.dumps([self.rank, version, outcome.rank, outcome.reason])
        self.set(f"{name}/failure/{number}", text)

    # The store.

    def has(self, *keys: str) -> bool:
        """Return whether all of some keys have values."""
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def get(self, key: str) -> str:
        """Return the value of a key that has one."""
        return self._ask(lambda: str(self._store.get(key).decode()))

    def set(self, key: str, value: str) -> None:
        """Give a key a value."""
        self._ask(lambda: self._store.set(key, value))

    def delete(self, key: str) -> None:
        """Remove a key that nobody needs any more."""
        self._ask(lambda: self._store.delete_key(key))

    def put_first(self, key: str, value: str) -> bool:
        """Give a key its first value; return False if it has another one."""
        found = self._ask(lambda: self._store.compare_set(key, "", value))
        return bool(found.decode() == value)

    def _ask(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except RuntimeError as error:
            raise CheckpointError(f"the store of the ranks failed: {error}") from error


class StoreAttempt(Attempt):
    """A round whose votes are keys of the store."""

    def __init__(self, group: StoreGroup, name: str, version: int, number: int) -> None:
        super().__init__(group.rank, name, version, number)
        self._group = group

    def vote(self, step: str) -> None:
        """Vote for a step."""
        self._group.set(self._vote(step, self._rank), "1")
        self._clock = Waited()

    def outcome(self, step: str) -> Outcome | None:
        """Return what was settled, after settling it if that is possible now; None: wait on."""
        group = self._group
        found = self.settled(step)
        if found is None:
            self.missing = [
                rank for rank in range(group.ranks) if not group.has(self._vote(step, rank))
            ]
            if self.missing and self._clock.look() < group.timeout_s:
                return None
            found = self.settle(step, self._decide())
        if found.ok and step == PUBLISHED:
            group.note_complete(self._name, self.version)
        return found

    def _decide(self) -> Outcome:
        if not self.missing:
            return Outcome(True)
        reason = f"has not written it within {self._group.timeout_s:g} s"
        return Outcome(False, self.missing[0], reason)

    def settled(self, step: str) -> Outcome | None:
        """Return what was settled; None if nothing was."""
        key = self._settled(step)
        if not self._group.has(key):
            return None
        ok, rank, reason, _ = json.loads(self._group.get(key))
        return Outcome(ok, rank, reason)

    def settle(self, step: str, outcome: Outcome) -> Outcome:
        """Settle a step, unless another process has; return what is settled."""
        reason = outcome.reason[:_REASON_CHARS_MAX]
        text = json.dumps([outcome.ok, outcome.rank, reason, self._rank])
        if not self._group.put_first(self._settled(step), text):
            found = self.settled(step)
            assert found is not None, "a key that has a first value keeps it"
            return found
        if not outcome.ok:
            self._group.note_failure(self._name, self.version, outcome)
        return outcome

    def end(self) -> None:
        """Remove the votes of this rank: whoever looks again finds what was settled."""
        for step in (PREPARED, PUBLISHED):
            self._group.delete(self._vote(step, self._rank))

    def _vote(self, step: str, rank: int) -> str:
        return f"{self._name}/{self.version}/{self.number}/{step}/{rank}"

    def _settled(self, step: str) -> str:
        return _settled(self._name, self.version, self.number, step)


def _settled(name: str, version: int, number: int, step: str) -> str:
    return f"{name}/{version}/{number}/{step}/settled"
