"""How a version gets into the folder: written, then committed by this rank or by all of them."""

from __future__ import annotations

import contextlib
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
    DamagedVersionError,
    FlashwarpError,
    MissingVersionError,
)

_log = logging.getLogger(__name__)

Fill = Callable[[Any, Callable[[], bool]], bool]
"""Writes the bytes of a version; returns False if it was given up because nobody wants it."""


@dataclass(eq=False)
class Removal:
    """A discarded version, which stores may have files of it, and how their removal ended."""

    entry: Entry
    stored: bool
    remote: bool
    error: BaseException | None = None
    done: bool = False


class Storing:
    """Writes of one checkpointer to its folder.

    `commits` commits versions together with other ranks. From `remote` it reads those that are
    missing or damaged in the folder.
    """

    def __init__(
        self, core: Core, directory: Any, commits: GroupCommits | None, remote: Any = None
    ) -> None:
        self._core = core
        self._directory = directory
        self._commits = commits
        self._remote = remote
        # Called under the lock with each version that has become durable.
        self.durable: Callable[[Entry], None] = lambda _: None
        self._fetching = endings.Lock()
        # What was fetched appears before its removal, which then removes it, or not at all.
        self._publishing = endings.Lock()

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

    def open(self, key: Key, identity: str = "") -> Any:
        """Open a version of the folder, after it was fetched from the remote store if need be.

        With an identity, a version of another one is MissingVersionError: this one is gone.
        """
        try:
            found = self._directory.open(*key)
        except (MissingVersionError, DamagedVersionError) as problem:
            self._fetch(key, identity, problem)
            found = self._directory.open(*key)
        if identity and found.identity != identity:
            found.close()
            raise MissingVersionError(
                f"version {key[1]} of {key[0]!r} was discarded and written again since it was "
                "looked at: read the one that is there now"
            )
        return found

    def read(self, entry: Entry, act: Callable[[Any], None]) -> None:
        """Read a version; if its bytes are damaged, once more from the remote store."""
        try:
            with self.open(entry.key, entry.identity) as reader:
                act(reader)
        except DamagedVersionError as problem:
            self._fetch(entry.key, entry.identity, problem)
            with self.open(entry.key, entry.identity) as reader:
                act(reader)

    def _fetch(self, key: Key, identity: str, problem: FlashwarpError) -> None:
        """Bring a version back into the folder; raises the problem if the remote has it not."""
        core = self._core
        if self._remote is None or not self._directory.writable:
            raise problem
        discarded: set[Key] = set()
        with self._fetching:
            with core.changed:
                if key not in core.in_remote or not core.exists(key):
                    raise problem
                core.fetching = key
                core.discarded_since[self] = discarded
            try:
                self._copy_back(key, identity, problem, discarded)
            finally:
                with core.changed:
                    core.fetching = None
                    del core.discarded_since[self]
                    core.wake()

    def _copy_back(
        self, key: Key, identity: str, problem: FlashwarpError, discarded: set[Key]
    ) -> None:
        with self._remote.open(*key) as reader:
            missing = isinstance(problem, MissingVersionError)
            if missing and self._directory.identity(*key) is not None:
                return  # another thread has fetched it
            if identity:
                same = reader.identity == identity
            else:
                same = self._directory.may_be(*key, reader.identity)
            if not same:
                problem.add_note("the remote store has another version of this number")
                raise problem
            _log.warning(
                "version %d of %r is fetched from the remote store: %s", key[1], key[0], problem
            )
            entry = Entry(key, tuple(reader.regions), reader.identity)
            with self._directory.begin_copy(reader, replace=True) as writer:
                if self._core.mover.copy_stored(
                    entry, reader, writer, lambda: not self._core.closing and key not in discarded
                ):
                    writer.prepare()
                    with self._publishing:
                        if key not in discarded:
                            writer.publish()
                            return
            raise problem

    # Removing.

    def remove(self, removals: Sequence[Removal]) -> None:
        """Remove versions from the stores; those of one name share a sync of their folder.

        Each removal gets the error of its name, if there is one.
        """
        # First: a copy that stays must not come back, whatever happens to this process.
        for name, some in _by_name(each for each in removals if each.remote):
            try:
                self._directory.note_discarded(name, [each.entry.key[1] for each in some])
            except (FlashwarpError, OSError) as error:
                self._stays(name, some, error)
        for name, some in _by_name(each for each in removals if each.stored and not each.error):
            versions = [each.entry.key[1] for each in some]
            try:
                with self._publishing:
                    self._directory.discard_all(name, versions)
                if self._commits is not None:
                    for version in versions:
                        self._commits.discard(name, version)
            except (FlashwarpError, OSError) as error:
                self._stays(name, some, error)
        # Last: the remote store may fail.
        with self._core.changed:
            under_way = self._core.uploading
        left = [each for each in removals if each.remote and each.entry is not under_way]
        for name, some in _by_name(each for each in left if not each.error):
            try:
                self._remote.discard_all(name, [each.entry.key[1] for each in some])
            except (FlashwarpError, OSError) as error:
                with self._core.changed:
                    for each in some:
                        each.error = error
                        self._core.leftovers[each.entry.key] = 0, self._core.settings.retry_s
            else:
                for each in some:
                    self._directory.forget_discarded(*each.entry.key)

    def _stays(self, name: str, removals: list[Removal], error: BaseException) -> None:
        """Note what the folder still has of versions that it refused to remove."""
        there: set[int] = set()
        with contextlib.suppress(FlashwarpError, OSError):
            there.update(self._directory.versions(name))
        with self._core.changed:
            for each in removals:
                each.error = error
                if each.entry.key[1] in there:
                    self._core.listed.setdefault(name, set()).add(each.entry.key[1])

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

        writer = self._directory.begin(*entry.key, entry.regions, identity=entry.identity)
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
                core.whole(partial(self.durable, entry))
            core.wake()
        if discarded:
            forget_stored(self._directory, *entry.key)
        return not discarded


def _by_name(removals: Iterable[Removal]) -> Iterator[tuple[str, list[Removal]]]:
    found: dict[str, list[Removal]] = {}
    for each in removals:
        found.setdefault(each.entry.key[0], []).append(each)
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
