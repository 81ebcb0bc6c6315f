"""The parts of a checkpointer, opened in order and closed in reverse: storage, memory, threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from flashwarp.checkpoint.buffer import ALIGNMENT
from flashwarp.checkpoint.core import Core, hint_key
from flashwarp.checkpoint.directory import Catalog, Directory
from flashwarp.checkpoint.eviction import policy_of
from flashwarp.checkpoint.flushing import FLUSHES_MAX, Flusher, Uploader, note_room, release
from flashwarp.checkpoint.futures import Saved
from flashwarp.checkpoint.memory import GrowingMemory
from flashwarp.checkpoint.mover import Mover
from flashwarp.checkpoint.prediction import Backlog
from flashwarp.checkpoint.prefetching import Prefetcher
from flashwarp.checkpoint.ranks import Group, GroupCommits
from flashwarp.checkpoint.settings import Settings
from flashwarp.checkpoint.storing import Removal, Storing
from flashwarp.checkpoint.tier import Entry, Key, Tier
from flashwarp.checkpoint.workers import Crew, Job
from flashwarp.device import Device
from flashwarp.device.memory import DeviceMemory
from flashwarp.errors import (
    ArgumentError,
    CheckpointError,
    DamagedVersionError,
    FlashwarpError,
    MissingVersionError,
    ReadOnlyError,
)

_log = logging.getLogger(__name__)

_LIST_AGAIN_S = 0.05
_REMOVED_AFTER_S = 1.0


class System:
    """Owns the directory, the memory of the tiers and the threads of one checkpointer.

    `cache_bytes` are those of the GPU cache and of the host cache; 0: none.
    """

    def __init__(
        self,
        path: str,
        device: Device,
        cache_bytes: tuple[int, int],
        remote: str | os.PathLike[str] | Catalog | None,
        rank: int,
        settings: Settings,
        keep_last: int | None = None,
    ) -> None:
        self.device = device
        self._keep_last = keep_last
        self._settings = settings
        # Released in reverse. Each may be called twice.
        self._closers: list[Callable[[], object]] = []
        self._crews: list[Crew] = []
        self._listed_ns: dict[str, int] = {}
        # Names of which the remote store did not say what it has; `versions` and `test` ask again.
        self._remote_unknown: set[str] = set()
        self.commits: GroupCommits | None = None
        self._removals: list[Removal] = []
        self._removals_began_ns = 0
        try:
            self.directory = Directory(path, rank, writable=not settings.read_only)
            self._closers.append(self.directory.close)
            self.remote = self._open_remote(remote, rank)
            self.mover = Mover(self.device, settings.transfer_bytes, settings.timeout_s)
            self._closers.append(self.mover.close)
            self.core = Core(settings, self.mover)
            self._crews.append(self.mover.crew)
            self.core.uploads = self.remote is not None
            self.commits = self._join(rank)
            self.storing = Storing(self.core, self.directory, self.commits, self.remote)
            self.storing.durable = self._prune
            self._make_tiers(cache_bytes)
            self._start()
        except BaseException:
            self.close()
            raise

    def _join(self, rank: int) -> GroupCommits | None:
        settings = self._settings
        if settings.ranks == 1 and settings.votes is None:
            return None
        if rank >= settings.ranks:
            raise ArgumentError(
                f"rank={rank}, and ranks={settings.ranks}: pass a rank below, or more ranks"
            )
        if settings.votes is not None:
            agreement = settings.votes.join(
                self.directory, rank, settings.ranks, settings.timeout_s
            )
            return GroupCommits(self.core, self.directory, agreement, self.remote)
        if not settings.read_only and not self.directory.locked:
            raise ArgumentError(
                f"the file system of {self.directory.path} has no locks, which tell living ranks "
                f"from dead ones: take another one in place of ranks={settings.ranks}"
            )
        group = Group(
            self.directory.path,
            rank,
            settings.ranks,
            settings.timeout_s,
            writable=not settings.read_only,
        )
        return GroupCommits(self.core, self.directory, group, self.remote)

    def _open_remote(self, remote: str | os.PathLike[str] | Catalog | None, rank: int) -> Any:
        if remote is None:
            return None
        found: Any
        if isinstance(remote, Catalog):
            if remote.rank != rank:
                raise ArgumentError(f"{remote!r} is of rank {remote.rank}, not {rank}")
            return remote  # whoever made it closes it
        text, options = os.fspath(remote), dict(self._settings.remote_options)
        if "://" in text:
            from flashwarp.checkpoint.directory import RemoteDirectory  # needs obstore

            found = RemoteDirectory(text, rank, **options)
        elif options:
            raise ArgumentError(f"remote_options are for a URL, and remote={text!r} is a folder")
        else:
            found = Directory(text, rank, writable=not self._settings.read_only)
        self._closers.append(found.close)
        return found

    # Memory.

    def _make_tiers(self, cache_bytes: tuple[int, int]) -> None:
        gpu_bytes, host_bytes = (nbytes // ALIGNMENT * ALIGNMENT for nbytes in cache_bytes)
        core = self.core
        if gpu_bytes:
            memory = self.device.allocate(gpu_bytes)
            self._closers.append(memory.close)
            core.tiers.append(self._tier("gpu", memory, gpu_bytes, memory.on_host, gpu_bytes))
        if host_bytes:
            host = GrowingMemory(self.device, host_bytes)
            self._closers.append(host.close)
            tier = self._tier("host", host, host_bytes, True, 0)
            core.tiers.append(tier)
            self._do("growing", "look", partial(self._next_growth, [tier], host))

    def _tier(
        self,
        name: str,
        memory: DeviceMemory | GrowingMemory,
        nbytes: int,
        on_host: bool,
        usable_bytes: int,
    ) -> Tier:
        core = self.core
        return Tier(
            name,
            memory.address,
            nbytes,
            on_host,
            policy_of(self._settings.eviction),
            Backlog(
                self.mover.links["down" if name == "gpu" else "to storage"],
                in_order=not self._settings.discard_consumed,
            ),
            core.hints.number,
            usable_bytes,
        )

    def _next_growth(self, left: list[Tier], memory: GrowingMemory) -> Callable[[], None] | None:
        return partial(self._grow, left.pop(), memory) if left else None

    def _grow(self, tier: Tier, memory: GrowingMemory) -> None:
        core = self.core
        try:
            for nbytes in memory.grow(lambda: not core.closing):
                with core.changed:
                    tier.table.grow(nbytes)
                    core.wake()
        except FlashwarpError as error:
            # What is pinned is enough to run on; the caches are smaller than was asked for.
            _log.warning(
                "pinning of the host cache stopped at %d of %d bytes, with which the run goes on: "
                "%s",
                tier.table.nbytes,
                tier.nbytes,
                error,
            )
            with core.changed:
                tier.nbytes = tier.table.nbytes
                core.wake()

    # Threads.

    def _start(self) -> None:
        core = self.core
        # Slower tiers first: what a flush leads to has a thread then.
        below: Tier | None = None
        for tier in reversed(core.tiers):
            flusher = Flusher(core, tier, below, self.storing)
            reading: set[Entry] = set()
            prefetch = partial(Prefetcher, core, tier, below, self.storing, reading)
            if below is None:
                # Of two prefetches, one begins while the last pieces of the other are read.
                for each in (prefetch(), prefetch()):
                    core.serve("prefetch", core.mover.crew, each.next_job)
                core.serve("flush", core.mover.crew, flusher.next_job, FLUSHES_MAX)
            else:
                below.above = tier
                self._do(f"flush-{tier.name}", "flush", flusher.next_job)
                self._do(f"prefetch-{tier.name}", "prefetch", prefetch().next_job)
            below = tier
        if self.commits is not None:
            self._do(self.commits.crew, "ranks", self.commits.next_job)
        self._do("catalog", "look", self._next_look)
        self._do("removing", "look", self._next_removal)
        self._closers.append(self._remove_rest)
        if self.remote is not None:
            uploader = Uploader(core, self.directory, self.remote)
            self._do("upload", "flush", uploader.next_job)

    def _do(self, crew: Crew | str, role: str, next_job: Callable[[], Job | None]) -> None:
        """Start a thread, by its name, or a crew, for one kind of jobs."""
        found = Crew(crew, self.mover.crew.lock) if isinstance(crew, str) else crew
        self._crews.append(found)
        self.core.serve(role, found, next_job)

    def _warn_of_leftovers(self) -> None:
        for name, version in self.core.leftovers:
            _log.warning(
                "version %d of %r was discarded, and stays in the remote store, which refused to "
                "remove it: the next run asks it again",
                version,
                name,
            )

    # Versions on storage.

    def list_versions(self, name: str) -> None:
        """Look which versions of a name the folder has."""
        core = self.core
        with core.changed:
            # A writer's folder is changed by nobody else, and each of its changes is noted.
            known = name in core.listed and name not in self._remote_unknown
            if known and not self._settings.read_only:
                return
        token, gone = object(), set[Key]()
        try:
            core.discarded_since[token] = gone
            found = set(self.directory.versions(name))
            discarded = self.directory.discarded(name)
            remote = self._remote_versions(name) - discarded
            if self.commits is not None:
                found, remote = (self._of_all_ranks(name, each) for each in (found, remote))
            with core.changed:
                core.whole(partial(self._note_listed, name, found, remote, gone))
                if self.remote is not None and not self._settings.read_only:
                    for version in discarded:
                        core.leftovers.setdefault((name, version), (0, self._settings.retry_s))
        finally:
            core.discarded_since.pop(token, None)

    def _note_listed(
        self, name: str, found: set[int], remote: set[int], gone: Iterable[Key]
    ) -> None:
        core = self.core
        self._listed_ns[name] = core.now_ns()
        if self._settings.read_only:
            core.listed[name] = found | remote
            core.unreadable = {key for key in core.unreadable if key[0] != name}
            for key, entry in list(core.entries.items()):
                if key[0] == name and key[1] not in core.listed[name]:
                    core.retire(entry, keep_hints=True)  # by the process that writes it
        else:
            # What was discarded meanwhile may have been seen before, and written again since.
            discarded = {version for each, version in gone if each == name}
            remote = remote - discarded
            core.listed[name] = core.listed.get(name, set()) | (found - discarded) | remote
        core.in_remote.update((name, version) for version in remote)
        core.wake()

    def _remote_versions(self, name: str) -> set[int]:
        """Return what the second store has; a store that fails stops nobody."""
        if self.remote is None:
            return set()
        try:
            found = set(self.remote.versions(name))
            self._remote_unknown.discard(name)
            return found
        except (FlashwarpError, OSError) as error:
            self._remote_unknown.add(name)
            _log.warning("the versions of %r in the remote store are not known: %s", name, error)
            return set()

    def _of_all_ranks(self, name: str, found: set[int]) -> set[int]:
        """Leave out versions that not all ranks have committed."""
        assert self.commits is not None
        complete = self.commits.group.complete(name)
        if found - complete:
            _log.warning(
                "left out %d versions of %r that not all of %d ranks have committed, the newest "
                "is %d",
                len(found - complete),
                name,
                self._settings.ranks,
                max(found - complete),
            )
        return found & complete

    def load(self, key: Key, *, fetch: bool = True) -> Entry:
        """Look at the manifest of a stored version, and return what it holds.

        A version that is missing or damaged in the folder is fetched from the remote store.
        """
        core = self.core
        with core.changed:
            self._check_listed(key)
        try:
            with self.storing.open(key) if fetch else self.directory.open(*key) as reader:
                entry = Entry(key, tuple(reader.regions), reader.identity, stored=True)
        except MissingVersionError:
            with core.changed:
                self._forget_other(key, "")
            raise
        with core.changed:
            self._forget_other(key, entry.identity)
            if key not in core.entries:
                self._check_listed(key)  # it may have been discarded meanwhile
                core.entries[key] = entry
                core.listed.setdefault(key[0], set()).add(key[1])
                core.wake()
            return core.entries[key]

    def _forget_other(self, key: Key, identity: str) -> None:
        """Forget what a reader has of another version of a number; called under the lock."""
        known = self.core.entries.get(key)
        if self._settings.read_only and known is not None and known.identity != identity:
            self.core.whole(partial(self.core.retire, known, keep_hints=True))

    def load_here(self, key: Key) -> Entry | None:
        """Return a version of the folder; None if only the remote store has it, as it says now."""
        try:
            return self.load(key, fetch=False)
        except (MissingVersionError, DamagedVersionError):
            if not self.core.exists(key) or self.remote.identity(*key) is None:
                raise
            return None

    def _check_listed(self, key: Key) -> None:
        """Raise if a version was discarded whose files may still be there; called under the lock.

        For a reader the folder decides: another process writes.
        """
        if not self._settings.read_only and not self.core.exists(key):
            raise MissingVersionError(f"version {key[1]} of {key[0]!r} does not exist")

    def _next_look(self) -> Callable[[], None] | None:
        """Return a look at the manifest of the next hinted version that is not known."""
        core = self.core
        if core.closing or not (core.look or (self._settings.read_only and len(core.hints))):
            return None
        for hint in core.lookahead():
            key = hint_key(hint)
            if key in core.entries or key in core.unreadable:
                continue
            if key[1] in core.listed.get(key[0], ()):
                return partial(self._look, key)
            if self._settings.read_only and self._list_is_old(key[0]):
                return partial(self._list_again, key[0])
        core.look = False
        return None

    def _list_is_old(self, name: str) -> bool:
        age_ns = self.core.now_ns() - self._listed_ns.get(name, -(1 << 62))
        return age_ns > _LIST_AGAIN_S * 1e9

    def _look(self, key: Key) -> None:
        try:
            self.load(key)
        except (FlashwarpError, OSError) as error:
            with self.core.changed:
                if not self.core.exists(key):
                    return  # it was discarded meanwhile
                self.core.unreadable.add(key)
            _log.warning("version %d of %r cannot be prefetched: %s", key[1], key[0], error)

    def _list_again(self, name: str) -> None:
        try:
            self.list_versions(name)
        except (FlashwarpError, OSError) as error:
            _log.warning("the versions of %r cannot be listed: %s", name, error)

    def discard_key(self, key: Key) -> Removal:
        """Discard the version of a number, if there is one; raises MissingVersionError."""
        core = self.core
        with core.locked():
            core.check_usable()
            if self._settings.read_only:
                raise ReadOnlyError("the checkpointer was opened with read_only")
            entry = core.entries.get(key)
            if entry is None:
                if key not in core.leftovers:
                    self._check_listed(key)
                entry = Entry(key, (), stored=core.exists(key))  # whatever its manifest says
            core.number_wanted = True
            note_room(core)
            removal, future = self._retire(entry)
        _fail(future, entry)
        return removal

    def discard(self, entry: Entry) -> Removal:
        """Remove a version from all tiers and stores; flushes that are pending give up.

        A thread removes the files. The number of the version is in use until then.
        """
        with self.core.locked():
            removal, future = self._retire(entry)
        _fail(future, entry)
        return removal

    def _retire(self, entry: Entry) -> tuple[Removal, Saved | None]:
        """Discard a version; called under the lock. Its future is for the caller to fail."""
        core = self.core
        remote = entry.sent or entry.key in core.in_remote or entry.key in core.leftovers
        remote = remote or entry.key[0] in self._remote_unknown
        removal = Removal(entry, entry.stored, remote)
        if entry.discarded:
            removal.done = True
            return removal, None
        core.in_remote.discard(entry.key)
        core.leftovers.pop(entry.key, None)
        core.retire(entry)
        removal.done = not (removal.stored or removal.remote)
        if not removal.done:
            if not self._removals:
                self._removals_began_ns = core.now_ns()
            self._removals.append(removal)
            core.busy[entry] += 1
            core.wake("look")
        return removal, core.futures.pop(entry, None)

    def _prune(self, durable: Entry) -> None:
        """Discard what a durable version has made superfluous; called under the lock.

        Versions of larger numbers are of a run that this one has gone back behind: they stay.
        """
        if self._keep_last is None:
            return
        core, name = self.core, durable.key[0]
        # One that was made later may have become durable before it.
        stored = (each for each in core.entries.values() if each.stored and each.key[0] == name)
        version = max(stored, key=lambda each: each.made, default=durable).key[1]
        older = sorted(each for each in core.listed[name] if each <= version)[: -self._keep_last]
        if self.remote is not None:
            # The newest that the remote store has stays until it has a newer one.
            there = [each for each in core.listed[name] if (name, each) in core.in_remote]
            older = [each for each in older if each < max(there, default=0)]
        for key in ((name, each) for each in older):
            if not core.is_restored(key):
                entry = core.entries.get(key) or Entry(key, (), stored=True)
                if entry is not core.uploading:
                    self._retire(entry)

    def _next_removal(self) -> Callable[[], None] | None:
        """Return the removal of all that waits, which lets reads of storage go first for a while.

        The sync of a folder takes as long as some reads, and keeps others from the disk meanwhile.
        """
        core = self.core
        if not self._removals:
            return None
        waited_ns = core.now_ns() - self._removals_began_ns
        if core.storage_reads and not core.number_wanted and waited_ns < _REMOVED_AFTER_S * 1e9:
            return None
        core.number_wanted = False
        removals, self._removals = self._removals, []
        return partial(self._remove, removals)

    def _remove(self, removals: list[Removal]) -> None:
        core = self.core
        try:
            self.storing.remove(removals)
        finally:
            with core.changed:
                for each in removals:
                    each.done = True
                    release(core, each.entry)
                note_room(core)
        for each in removals:
            if each.error is not None:
                _log.warning("%s was discarded, and some files stay: %s", each.entry, each.error)

    def _remove_rest(self) -> None:
        removals, self._removals = self._removals, []
        if removals:
            self._remove(removals)
        self._warn_of_leftovers()

    # The end.

    def close(self) -> list[BaseException]:
        """End the threads, and release everything; return what failed. May be called twice."""
        failures: list[BaseException] = []
        for crew in self._crews:
            crew.stop()
        running = [name for crew in self._crews for name in crew.join(self._settings.timeout_s)]
        if running:
            names = ", ".join(running)
            # Memory that a thread may still copy to is not freed.
            return [TimeoutError(f"threads {names} have not ended: their memory is not freed")]
        self._crews.clear()
        if self.commits is not None:
            self.commits.close()
        while self._closers:
            try:
                self._closers.pop()()
            except Exception as error:
                failures.append(error)
        return failures


def _fail(future: Saved | None, entry: Entry) -> None:
    """Let whoever waits for a version know that it was discarded."""
    if future is not None and not future.done():
        future.observed = True
        future.set_exception(CheckpointError(f"{entry} was discarded before it was durable"))
