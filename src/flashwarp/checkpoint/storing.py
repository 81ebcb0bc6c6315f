"""How a version gets into the folder: written, then committed by this rank or by all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashwarp import endings
from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.ranks import Attempt, Ended, GroupCommits
from flashwarp.checkpoint.tier import Entry, Key
from flashwarp.errors import (
    CheckpointError,
    DamagedVersionError,
    FlashwarpError,
    MissingVersionError,
)

__all__ = ["Removal", "Storing", "forget_stored", "wanted"]

_log = logging.getLogger(__name__)

Fill = Callable[[Any, Callable[[], bool]], bool]
"""Writes the bytes of a version; returns False if it was given up because nobody wants it."""


@dataclass(frozen=True)
class Removal:
    """A discarded version, and whether the folder and the remote store have files of it."""

    entry: Entry
    stored: bool
    remote: bool


class Storing:
    """Writes of one checkpointer to its folder.

    Parameters
    ----------
    core : Core
        The checkpointer's state.
    directory : Directory
        Storage.
    commits : GroupCommits or None
        Commits versions together with other ranks.
    remote : Catalog or None
        Where versions are read that are missing or damaged in the folder.
    """

    def __init__(
        self, core: Core, directory: Any, commits: GroupCommits | None, remote: Any = None
    ) -> None:
        self._core = core
        self._directory = directory
        self._commits = commits
        self._remote = remote
        self._fetching = endings.Lock()

    def write(self, entry: Entry, fill: Fill, ended: Ended) -> None:
        """Write a version; `ended` is called once it is stored, given up, or has failed.

        That is before the call returns, or later, if other ranks must agree.
        """
        try:
            if self._commits is None:
                done = self._write(entry, fill, lambda writer: writer.commit())
            elif self._write_with_others(self._commits, entry, fill, ended):
                return
            else:
                done = False
        except (FlashwarpError, OSError, MemoryError) as failure:
            ended(False, failure)
            return
        ended(done and self._stored(entry), None)

    # Reading.

    def open(self, name: str, version: int) -> Any:
        """Open a version of the folder, after it was fetched from the remote store if need be."""
        try:
            return self._directory.open(name, version)
        except (MissingVersionError, DamagedVersionError) as problem:
            self._fetch(name, version, problem)
        return self._directory.open(name, version)

    def read(self, key: Key, act: Callable[[Any], None]) -> None:
        """Read a version; if its bytes are damaged, once more from the remote store."""
        try:
            with self.open(*key) as reader:
                act(reader)
        except DamagedVersionError as problem:
            self._fetch(*key, problem)
            with self.open(*key) as reader:
                act(reader)

    def _fetch(self, name: str, version: int, problem: FlashwarpError) -> None:
        """Bring a version back into the folder; raises the problem if the remote has it not."""
        if self._remote is None or (name, version) not in self._core.in_remote:
            raise problem
        with self._fetching:
            _log.warning(
                "version %d of %r is fetched from the remote store: %s", version, name, problem
            )
            with self._remote.open(name, version) as reader:
                entry = Entry((name, version), tuple(reader.regions))
                writer = self._directory.begin(
                    name, version, reader.regions, replace=True, metadata=reader.metadata
                )
                with writer:
                    if self._core.mover.copy_stored(
                        entry, reader, writer, lambda: not self._core.closing
                    ):
                        writer.commit()
                    else:
                        raise problem

    # Removing.

    def discard(self, entry: Entry, later: Callable[[Removal], None] | None = None) -> None:
        """Remove a version from all tiers and stores; flushes that are pending give up.

        What is to be removed from the stores goes to `later`, if that is given, under the lock.
        """
        core = self._core
        with core.locked():
            if entry.discarded:
                return
            in_remote = entry.remote or entry.key in core.in_remote
            removal = Removal(entry, entry.stored, in_remote)
            core.in_remote.discard(entry.key)
            core.retire(entry)
            future = core.futures.pop(entry, None)
            if later is not None and (removal.stored or removal.remote):
                later(removal)
        if future is not None and not future.done():
            future.observed = True
            future.set_exception(CheckpointError(f"{entry} was discarded before it was durable"))
        if later is None:
            self.remove([removal])

    def remove(self, removals: Sequence[Removal]) -> None:
        """Remove versions from the stores; those of one name share a sync of their folder."""
        for name, versions in _by_name(each for each in removals if each.stored):
            self._directory.discard_all(name, versions)
            if self._commits is not None:
                for version in versions:
                    self._commits.discard(name, version)
        # Last: the remote store may fail.
        for name, versions in _by_name(each for each in removals if each.remote):
            self._remote.discard_all(name, versions)

    # Writing.

    def _write(
        self,
        entry: Entry,
        fill: Fill,
        commit: Callable[[Any], None],
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        def still_wanted() -> bool:
            check()
            return wanted(self._core, entry)

        writer = self._directory.begin(*entry.key, entry.regions)
        try:
            done = fill(writer, still_wanted)
            if done:
                commit(writer)
        except BaseException:
            writer.abort()
            raise
        if not done:
            writer.abort()
        return done

    def _write_with_others(
        self, commits: GroupCommits, entry: Entry, fill: Fill, ended: Ended
    ) -> bool:
        attempt = commits.begin(entry)
        end = partial(self._end, entry, ended)
        try:
            done = self._write(
                entry,
                fill,
                lambda writer: commits.prepared(entry, writer, attempt, end),
                attempt.check,
            )
        except BaseException as error:
            _fail(attempt, str(error))
            raise
        if not done:
            _fail(attempt, "its program does not need the version any more")
        return done

    def _end(self, entry: Entry, ended: Ended, done: bool, error: BaseException | None) -> None:
        ended(done and self._stored(entry), error)

    def _stored(self, entry: Entry) -> bool:
        """Note that a version is durable; False if it was discarded meanwhile."""
        core = self._core
        with core.changed:
            discarded = entry.discarded
            if not discarded:
                core.stored_now(entry)
                core.counts["stored_bytes"] += entry.data_bytes
                if core.uploads:
                    core.queues["remote"].append(entry)
            core.wake()
        if discarded:
            forget_stored(self._directory, *entry.key)
        return not discarded


def _by_name(removals: Iterable[Removal]) -> Iterator[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for name, version in (each.entry.key for each in removals):
        found.setdefault(name, []).append(version)
    yield from found.items()


def _fail(attempt: Attempt, reason: str) -> None:
    """Let the other ranks know; the failure itself is on its way to the caller."""
    try:
        attempt.fail(reason)
    except (FlashwarpError, OSError) as error:
        _log.warning("the other ranks notice a failure (%s) by time alone: %s", reason, error)


def wanted(core: Core, entry: Entry) -> bool:
    """Return whether the copies of a version still have to be made."""
    return not entry.discarded and not core.closing


def forget_stored(directory: Any, name: str, version: int) -> None:
    """Remove a version from a store that may not have it."""
    try:
        directory.discard(name, version)
    except MissingVersionError:
        return
