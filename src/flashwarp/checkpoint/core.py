"""What the threads of one checkpointer share: one lock, the tiers, the versions, and the counts.

Every decision is taken under the lock, and no copy and no I/O is made under it. A thread that waits
for room decides again after each change, so nothing that it has chosen can be taken from it, and no
failure of a version that it has waited for concerns it.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

from flashwarp import endings
from flashwarp._waiting import STEP_MAX_S, Waited
from flashwarp.checkpoint.buffer import Window
from flashwarp.checkpoint.futures import Saved
from flashwarp.checkpoint.hints import Hint, RestoreQueue
from flashwarp.checkpoint.life import Event, Fact
from flashwarp.checkpoint.mover import Mover
from flashwarp.checkpoint.prediction import Backlog, RestoreInterval
from flashwarp.checkpoint.settings import Settings
from flashwarp.checkpoint.tier import Entry, Key, Tier
from flashwarp.checkpoint.workers import Crew, Job
from flashwarp.errors import (
    CheckpointError,
    ClosedError,
    ExistingVersionError,
    ForkError,
    WaitTimeout,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_DISTANCE_MAX = 64

ROLES = ("flush", "prefetch", "look", "stage", "ranks")
"""Kinds of background threads: they flush and upload, prefetch, read manifests, stage, and commit
together with other ranks."""

# What begins makes work for nobody; what ends may make room, or a source, for a prefetch.
_BEGINNINGS = (Event.WRITE, Event.FETCH, Event.FLUSH, Event.READ, Event.PIN)


class Core:
    """The shared state of one checkpointer."""

    def __init__(self, settings: Settings, mover: Mover) -> None:
        self.settings = settings
        self.mover = mover
        # The lock of everything here, notified after each change.
        self.changed = endings.Condition(mover.crew.lock)
        mover.crew.broken = self._break  # also without caches, for which nobody serves
        # Each kind of background thread is woken for its own work: a wake-up of all of them takes
        # longer than most calls.
        self._wakes: dict[str, list[Callable[[], None]]] = {role: [] for role in ROLES}
        self.tiers: list[Tier] = []  # fastest first
        self.hints = RestoreQueue(settings.hints_max, settings.passed_max)
        self.interval = RestoreInterval()
        self.counts: Counter[str] = Counter()
        self.entries: dict[Key, Entry] = {}
        # Versions known to be in the directory, by name; filled when a name is first used.
        self.listed: dict[str, set[int]] = {}
        self.futures: dict[Entry, Saved] = {}
        # Flushes that wait, by the name of the tier they leave; "remote": those to the remote.
        self.queues: dict[str, deque[Entry]] = {"gpu": deque(), "host": deque(), "remote": deque()}
        # Work in progress of background threads, by version: a discarded one must end first.
        self.busy: Counter[Entry] = Counter()
        # Versions on their way out of the user's arrays: also these must end first.
        self.staging: set[Entry] = set()
        # Discarded versions that may still be copied somewhere.
        self._leaving: set[Entry] = set()
        self.retries: dict[tuple[str, Entry], tuple[int, float]] = {}
        # When something was removed from the disk last.
        self.room_made_ns = 0
        self.to_storage = Backlog(mover.links["to storage"])
        # Versions whose manifests could not be read; restarts try again.
        self.unreadable: set[Key] = set()
        # Numbers of which the remote store has versions, as it said or was given them. Whose these
        # are, only `Entry.remote` says.
        self.in_remote: set[Key] = set()
        # The version that is on its way there: whoever copies it removes it if it is discarded.
        self.uploading: Entry | None = None
        # Discarded versions that the remote store may have yet; when to ask it again, in ns, and
        # after which time from then on.
        self.leftovers: dict[Key, tuple[int, float]] = {}
        # By listing or fetch in progress: versions discarded since it began.
        self.discarded_since: dict[object, set[Key]] = {}
        self.fetching: Key | None = None
        """The version that is on its way from the remote store into the folder."""
        self.remote_failures: dict[Entry, BaseException] = {}
        self.broken: BaseException | None = None
        """What has ended a background thread: a bug, or no memory."""
        self.look = False
        """Whether a hint names a version on storage whose manifest was not read yet."""
        self.uploads = False
        """Whether there is a remote store."""
        self.durable_waits: set[object] = set()
        """Waits of the user's threads until versions are durable."""
        self.number_wanted = False
        """Whether a checkpoint waits until files of a discarded version are removed."""
        self.started = False
        self.storage_reads: set[object] = set()
        """Prefetches and restores that read storage."""
        # Versions that a call restores: pruning leaves them.
        self.restoring: Counter[Key] = Counter()
        self.closing = False
        self.closed = False
        self._pid = os.getpid()

    # Waiting.

    def now_ns(self) -> int:
        """Return the time on the monotonic clock."""
        return time.monotonic_ns()

    def of_this_process(self) -> bool:
        """Return whether the threads are of this process: not in a forked child."""
        return os.getpid() == self._pid

    def locked(self) -> endings.Condition:
        """Return the lock, for a call of the user's; raises in a forked child.

        There, a thread that does not exist may hold the lock for ever.
        """
        if not self.of_this_process():
            raise ForkError(
                f"this checkpointer belongs to process {self._pid}: a forked child must open its "
                "own, with another path or rank"
            )
        return self.changed

    def check_usable(self) -> None:
        """Raise if the checkpointer is closed, or a background thread has failed."""
        if self.closing:
            raise ClosedError("the checkpointer was closed")
        self.check_threads()

    def check_threads(self) -> None:
        """Raise if a background thread has ended by an error: what it had to do stays undone."""
        if self.broken is not None:
            raise CheckpointError(
                f"a background thread of the checkpointer has failed: {self.broken!r}"
            ) from self.broken

    def whole(self, act: Callable[[], T]) -> T:
        """Make changes that belong together, holding the lock; no signal comes in between.

        They may not take the lock again: another thread may make them.
        """
        return endings.uninterrupted(act)

    def wait_for(
        self,
        done: Callable[[], bool],
        what: Callable[[], str],
        timeout_s: float | None = None,
        *,
        flushes_first: bool = False,
    ) -> None:
        """Wait, holding the lock, until `done`; raises WaitTimeout, which says `what`.

        With `flushes_first`, flushes go before reads of storage meanwhile.
        """
        limit = self.settings.timeout_s if timeout_s is None else timeout_s
        clock, token = Waited(), object()
        try:
            if flushes_first:
                self.durable_waits.add(token)
                self.wake("flush")
            while not done():
                self.check_threads()
                if clock.look() >= limit:
                    raise WaitTimeout(f"{what()} (limit {limit:g} s)")
                self.changed.wait(min(STEP_MAX_S, max(limit, 1e-3)))
        finally:
            self.durable_waits.discard(token)

    def wake(self, *roles: str) -> None:
        """Wake the user's threads that wait, and background threads; without `roles`, all."""
        self.changed.notify_all()
        for role in roles or ROLES:
            if self.started or role != "prefetch" or not roles:
                for wake in self._wakes[role]:
                    wake()

    def serve(
        self, role: str, crew: Crew, next_job: Callable[[], Job | None], most: int = 1
    ) -> None:
        """Let a crew do a kind of jobs. Its errors break the checkpointer."""
        crew.broken = self._break
        self._wakes[role].append(crew.add(next_job, most))

    def _break(self, error: BaseException) -> None:
        self.broken = self.broken or error
        self.wake()

    # Versions.

    def tier_of(self, entry: Entry) -> Tier | None:
        """Return the fastest tier that has all bytes of a version."""
        return next((tier for tier in self.tiers if tier.holds(entry)), None)

    def is_filling(self, entry: Entry) -> bool:
        """Return whether bytes of a version are on their way into any tier."""
        return any(tier.filling(entry) for tier in self.tiers)

    def exists(self, key: Key) -> bool:
        """Return whether a version exists in any tier."""
        return key in self.entries or key[1] in self.listed.get(key[0], ())

    def versions(self, name: str) -> list[int]:
        """Return all versions of a name, ascending."""
        known = {version for found, version in self.entries if found == name}
        return sorted(known | self.listed.get(name, set()))

    def begin(self, entry: Entry, saved: Saved, path: str) -> None:
        """Enter a new version, once no copy of a discarded one of its number goes on.

        Called under the lock; raises ExistingVersionError. Whoever gives the version up may find it
        entered in part: a signal may come between any two lines.
        """
        self.check_usable()
        if self.in_use(entry.key):
            self.number_wanted = True
            self.wake("look")
        self.wait_for(
            lambda: not self.in_use(entry.key),
            lambda: f"{entry} was discarded, and its last copy has not ended",
        )
        if self.exists(entry.key):
            raise ExistingVersionError(
                errno.EEXIST, f"{entry} exists: discard it, or write another version", path
            )
        self.staging.add(entry)
        self.futures[entry] = saved
        self.entries[entry.key] = entry

    def saved(self, entry: Entry, began_ns: int, overlap: bool) -> None:
        """Note that the call of a checkpoint has ended well."""
        self.counts["checkpoints"] += 1
        self.counts["checkpoint_bytes"] += entry.data_bytes
        self.counts["checkpoint_ns"] += self.now_ns() - began_ns
        if not overlap:  # else the stager notes it
            self.staging.discard(entry)
            self.changed.notify_all()

    def stored_now(self, entry: Entry) -> None:
        """Note that a version is durable in the directory."""
        entry.stored, entry.failure = True, None
        self.unreadable.discard(entry.key)
        self.listed.setdefault(entry.key[0], set()).add(entry.key[1])
        future = self.futures.pop(entry, None)
        if future is not None and not future.done():
            future.set_result(entry.key[1])

    def failed_now(self, entry: Entry, error: BaseException) -> None:
        """Note that a version could not be written; it stays in the caches."""
        entry.failure = error
        self.counts["flush_failures"] += 1
        future = self.futures.get(entry)
        if future is not None and not future.done():
            future.set_exception(error)

    def unseen_failures(self) -> list[BaseException]:
        """Return what versions have failed with, as far as nobody has looked."""
        done = [each for each in self.futures.values() if not each.observed and each.done()]
        return [error for error in (each.exception(0) for each in done) if error is not None]

    def end_futures(self) -> None:
        """Fail the futures of versions that will not become durable any more."""
        for future in self.futures.values():
            if not future.done():
                future.observed = True
                future.set_exception(
                    CheckpointError("the checkpointer was closed before it was durable")
                )
        self.futures.clear()

    def lost(self) -> list[Entry]:
        """Return versions that only the caches have."""
        return [each for each in self.entries.values() if not each.stored and not each.discarded]

    # Room.

    def acquire(
        self,
        tier: Tier,
        entry: Entry,
        event: Event,
        timeout_s: float = math.inf,
        *,
        flush: bool = False,
    ) -> bool:
        """Wait for room in a tier, and take it; return False if a slower tier must be used.

        It returns False, too, if the version is discarded or the checkpointer closes meanwhile.

        The wait never depends on a restore, which the waiting thread may be the only one to make.
        Prefetches into the tier stop meanwhile; for a flush from the tier above only if a thread of
        the user's waits for its room there.
        """
        if not tier.fits(entry.nbytes):
            self.counts["oversized"] += 1
            return False
        waiting = tier.flushes_waiting if flush else tier.demands
        began_ns = self.now_ns()
        clock = Waited()
        try:
            waiting.add(entry)
            if self.storage_reads:
                self.wake("flush")  # which let reads of storage go first until now
            while not entry.discarded and not self.closing:
                # First: after a thread has failed, another one may still write to what looks free.
                self.check_threads()
                now_ns = self.now_ns()
                window = tier.choose(entry.nbytes, now_ns)
                if window is not None and window.wait_ns == 0:
                    self._take(tier, window, entry, event, now_ns)
                    self.counts["room_wait_ns"] += now_ns - began_ns
                    return True
                if window is None and tier.grown:
                    return False
                if window is None:
                    tier.awaited.pop(entry, None)
                else:
                    tier.awaited[entry] = tier.table.keys_in(window)
                if clock.look() >= timeout_s:
                    raise WaitTimeout(
                        f"{entry} waited {timeout_s:g} s for {entry.nbytes} bytes in the "
                        f"{tier.name} cache: {self.describe_tier(tier)}"
                    )
                self.changed.wait(STEP_MAX_S)
            return False
        finally:
            tier.awaited.pop(entry, None)
            waiting.discard(entry)
            self.wake("prefetch")

    def try_acquire(self, tier: Tier, entry: Entry, event: Event, keep_urgency: int) -> bool:
        """Take room in a tier if there is some now; for prefetches."""
        now_ns = self.now_ns()
        window = tier.choose(entry.nbytes, now_ns, keep_urgency)
        if window is None or window.wait_ns != 0:
            return False
        self._take(tier, window, entry, event, now_ns)
        return True

    def _take(self, tier: Tier, window: Window, entry: Entry, event: Event, now_ns: int) -> None:
        self.whole(partial(tier.take, window, entry, event, now_ns))
        self.changed.notify_all()

    def reads_first(self, tier: Tier) -> bool:
        """Return whether flushes from a tier to storage let reads of storage go first.

        Only if what is restored is discarded: then most of what waits will never be flushed. Not if
        somebody waits for the flushes, as other ranks may that commit the same versions.
        """
        if not self.settings.discard_consumed or not self.storage_reads:
            return False
        if self.durable_waits or self.settings.ranks > 1:
            return False
        return not tier.demanded

    def end_storage_read(self, reader: object) -> None:
        """Note that a reader of storage has ended; called under the lock."""
        self.storage_reads.discard(reader)
        if not self.storage_reads:
            self.wake("flush", "look")

    # Events.

    def apply(self, tier: Tier, entry: Entry, event: Event) -> None:
        """Apply an event to a version on a tier, and wake who waits."""
        tier.apply(entry, event, self.now_ns())
        if event in _BEGINNINGS:
            self.changed.notify_all()
        else:
            self.wake("prefetch")

    def apply_if(self, tier: Tier, entry: Entry, event: Event) -> bool:
        """Apply an event if it is allowed, and return whether it was."""
        life = tier.life(entry)
        if life is None or not life.allows(event):
            return False
        self.apply(tier, entry, event)
        return True

    def pin(self, tier: Tier, entry: Entry) -> None:
        """Pin a version for a hint, unless it is pinned; slower copies are then not needed."""
        life = tier.life(entry)
        if life is None or Fact.PINNED in life.facts or not life.allows(Event.PIN):
            return
        self.apply(tier, entry, Event.PIN)
        below = [each for each in self.tiers if each.above is tier]
        for each in below:
            self.apply_if(each, entry, Event.UNPIN)
            if entry in each.lives:
                each.refresh(entry, self.now_ns())

    def filled(self, tier: Tier, entry: Entry) -> None:
        """Note that a new version is on a tier, and queue its flush."""
        self.apply(tier, entry, Event.FILLED)
        if entry in tier.lives:
            self.queue_flush(tier, entry)

    def queue_flush(self, tier: Tier, entry: Entry) -> None:
        """Queue the flush of a version from a tier."""
        self.queues[tier.name].append(entry)
        tier.backlog.add(entry, entry.nbytes)
        # It is the last of the queue: the others end when they would have.
        now_ns = self.now_ns()
        ends_ns = tier.backlog.ends_ns(now_ns) if tier.backlog.in_order else None
        tier.refresh(entry, now_ns, ends_ns)
        self.wake("flush")

    def refresh(self, key: Key, *, wake: bool = True) -> None:
        """Tell the tiers about a hint for a version, or its end, and wake prefetches."""
        entry = self.entries.get(key)
        for tier in self.tiers:
            if entry is not None and entry in tier.lives:
                tier.refresh(entry, self.now_ns())
        if wake:
            self.wake("prefetch")

    def give_up_hint(self, key: Key) -> None:
        """Unpin a version whose hint restores have passed by."""
        entry = self.entries.get(key)
        if entry is not None:
            for tier in self.tiers:
                self.apply_if(tier, entry, Event.UNPIN)
            self.refresh(key)

    def retire(self, entry: Entry, *, keep_hints: bool = False) -> None:
        """Discard a version in all tiers; copies in progress end first."""
        entry.discarded = True
        self._leaving.add(entry)
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        self.listed.get(entry.key[0], set()).discard(entry.key[1])
        self.unreadable.discard(entry.key)
        for gone in self.discarded_since.values():
            gone.add(entry.key)
        if not keep_hints:
            self.hints.drop(entry.key)
        for tier in self.tiers:
            if entry in tier.lives:
                self.apply(tier, entry, Event.DISCARD)
        for key in [key for key in self.retries if key[1] is entry]:
            del self.retries[key]
        self.remote_failures.pop(entry, None)
        self.wake()

    def in_use(self, key: Key) -> bool:
        """Return whether a discarded version of this key may still be copied somewhere."""
        self._leaving = {
            each
            for each in self._leaving
            if each in self.busy
            or each in self.staging
            or any(each in tier.lives for tier in self.tiers)
        }
        return key == self.fetching or any(entry.key == key for entry in self._leaving)

    @contextmanager
    def kept(self, key: Key) -> Iterator[None]:
        """Keep a version from being pruned during a call that restores it."""
        with self.locked():
            self.restoring[key] += 1
        try:
            yield
        finally:
            with self.changed:
                self.restoring -= Counter([key])  # drops what is no more

    def is_restored(self, key: Key) -> bool:
        """Return whether a restore of a version is under way; called under the lock."""
        entry = self.entries.get(key)
        return self.restoring[key] > 0 or any(
            Fact.READING in tier.lives[entry].facts
            for tier in self.tiers
            if entry is not None and entry in tier.lives
        )

    # Counting.

    def prefetched_ahead(self) -> int:
        """Return how many of the next versions are in the fastest cache, up to 64.

        This is the prefetch distance of the paper, whose cache has room for 32.
        """
        count = 0
        for hint in islice(self.lookahead(), _DISTANCE_MAX):
            entry = self.entries.get(hint_key(hint))
            if entry is None or not self.tiers or not self.tiers[0].holds(entry):
                break
            count += 1
        return count

    def lookahead(self) -> Iterator[Hint]:
        """Yield the next hints, as many as a prefetch looks at."""
        return islice(self.hints.upcoming(), self.settings.lookahead)

    def describe_tier(self, tier: Tier) -> str:
        """Describe what a tier is full of, for an error."""
        states = Counter(state.value for _, state in tier.states())
        held = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "nothing"
        pinned = sum(Fact.PINNED in life.facts for life in tier.lives.values())
        return (
            f"it has {tier.table.nbytes} bytes, its largest gap {tier.table.largest_gap_bytes}, "
            f"and holds {held}; {pinned} pinned by hints"
        )


def hint_key(hint: Hint) -> Key:
    """Return the version that a hint names."""
    key = hint.key
    assert isinstance(key, tuple)
    return key
