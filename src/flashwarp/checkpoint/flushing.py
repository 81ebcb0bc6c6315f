"""Flushes: from each cache to the next slower tier, begun in the order of the checkpoints.

A flush from the GPU cache goes to the host cache, or straight to storage if the host cache cannot
take the version without a restore. A version whose flush fails stays where it is, which costs
room and loses nothing; the flush is tried again later.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from flashwarp._waiting import STEP_MAX_S
from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.life import Event, Fact
from flashwarp.checkpoint.storing import Storing, forget_stored, wanted
from flashwarp.checkpoint.tier import Entry, Key, Tier
from flashwarp.errors import CheckpointError, FlashwarpError

_log = logging.getLogger(__name__)

_RETRY_MAX_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOOK_MAX = 512
"""Versions of a queue among which the next flush is chosen: a look takes 0.2 ms."""

FLUSHES_MAX = 8
TOGETHER_BYTES = 64 << 20
"""Small versions are flushed together, up to so many bytes. A larger one begins when the last
pieces of the one before are on their way, and is written while that one is committed. Most of the
time of a small version goes by in syncs, which wait behind all that other processes have in flight.
So a process that flushes one small version at a time gets far less of the disk than one that
flushes large ones: disks serve processes by what each has in flight."""


class Flusher:
    """The flushes of one tier."""

    def __init__(self, core: Core, tier: Tier, below: Tier | None, storing: Storing) -> None:
        self._core = core
        self._tier = tier
        self._below = below
        self._storing = storing
        # Bytes of versions whose last pieces are not on their way yet.
        self._under_way: dict[Entry, int] = {}

    def next_job(self) -> Callable[[], None] | None:
        """Return the next flush; called under the lock."""
        core, tier = self._core, self._tier
        if core.closing or (self._below is None and core.reads_first(tier)):
            return None
        queue_due_retries(core, tier.name)
        queue = core.queues[tier.name]
        while queue:
            under_way = sum(self._under_way.values())
            entry = self._next(queue)
            if under_way and under_way + entry.nbytes > TOGETHER_BYTES:
                return None
            queue.remove(entry)
            life = tier.life(entry)
            if life is None or not life.allows(Event.FLUSH):
                tier.backlog.remove(entry)
                continue
            core.busy[entry] += 1
            core.apply(tier, entry, Event.FLUSH)
            self._under_way[entry] = entry.nbytes
            return partial(self._flush, entry)
        return None

    def _next(self, queue: deque[Entry]) -> Entry:
        """Return what is flushed next: the first of the queue, or what is restored last.

        If what is restored is discarded, a version that is restored before its flush needs none.
        What must leave for a version that waits for room goes before the others: of variable sizes,
        those that are restored last seldom lie side by side.
        """
        core = self._core
        if not core.settings.discard_consumed or not len(core.hints):
            return queue[0]

        def restored(entry: Entry) -> float:
            number = core.hints.number(entry.key)
            return math.inf if number is None else number

        some = list(islice(queue, _LOOK_MAX))
        awaited = {each for window in self._tier.awaited.values() for each in window}
        return max([each for each in some if each in awaited] or some, key=restored)

    def _flush(self, entry: Entry) -> None:
        core = self._core
        end = partial(self._end, entry, core.now_ns())
        try:
            done = self._to_below(entry)
            if done or not wanted(core, entry):
                end(done, None)
                return
        except (FlashwarpError, OSError, MemoryError) as failure:
            end(False, failure)
            return
        self._storing.write(entry, partial(self._store, entry), end)

    def _store(self, entry: Entry, writer: Any, wanted: Callable[[], bool]) -> bool:
        core, tier = self._core, self._tier

        def goes_on() -> bool:
            if core.reads_first(tier):
                with core.changed:
                    while core.reads_first(tier) and wanted():
                        core.changed.wait(STEP_MAX_S)
            return wanted()

        ending = partial(self._let_next_begin, entry)
        return core.mover.store_block(tier, entry, writer, goes_on, ending)

    def _let_next_begin(self, entry: Entry) -> None:
        """Note that the last bytes of a version are on their way to the disk."""
        with self._core.changed:
            self._under_way.pop(entry, None)
            self._core.wake("flush")

    def _end(self, entry: Entry, began_ns: int, done: bool, error: BaseException | None) -> None:
        core, tier = self._core, self._tier
        with core.changed:
            self._under_way.pop(entry, None)
            tier.backlog.remove(entry)
            core.apply(tier, entry, Event.FLUSHED if done else Event.FLUSH_FAILED)
            release(core, entry)
            if error is not None and not entry.discarded:
                entry.failed_ns = began_ns
                note_failure(core, tier.name, entry, error)
            tier.refresh_flushes(core.now_ns())
            core.counts[f"flushes_{tier.name}"] += done

    def _to_below(self, entry: Entry) -> bool:
        core, below = self._core, self._below
        if below is None:
            return False
        with core.changed:
            # Without a limit: what ends the wait is a flush of the tier below, which has its own.
            if below.life(entry) is not None or not core.acquire(
                below, entry, Event.WRITE, flush=True
            ):
                core.counts["host_bypassed"] += not entry.discarded
                return False
        try:
            done = core.mover.move(self._tier, below, entry, partial(wanted, core, entry))
        except BaseException:
            with core.changed:
                core.apply(below, entry, Event.FILL_FAILED)
            raise
        with core.changed:
            if done:
                core.filled(below, entry)
            else:
                core.apply(below, entry, Event.FILL_FAILED)
        return done


class Uploader:
    """The jobs of the thread that copies stored versions to the remote store."""

    def __init__(self, core: Core, directory: Any, remote: Any) -> None:
        self._core = core
        self._directory = directory
        self._remote = remote

    def next_job(self) -> Callable[[], None] | None:
        """Return the next upload; called under the lock."""
        core = self._core
        if core.closing:
            return None
        queue_due_retries(core, "remote")
        queue = core.queues["remote"]
        while queue:
            entry = queue.popleft()
            if entry.stored and not entry.remote and not entry.discarded:
                core.busy[entry] += 1
                entry.sent = True
                core.uploading = entry
                return partial(self._upload, entry)
        now_ns = core.now_ns()
        for key, (due_ns, _) in core.leftovers.items():
            # The upload of a version of the same number takes its place.
            if due_ns <= now_ns and not core.exists(key):
                return partial(self._remove, key)
        return None

    def _remove(self, key: Key) -> None:
        """Remove a discarded version that the store has refused to remove."""
        core = self._core
        try:
            self._remote.discard_all(key[0], [key[1]])
        except (FlashwarpError, OSError) as error:
            _log.info("version %d of %r stays in the remote store: %s", key[1], key[0], error)
            with core.changed:
                if key in core.leftovers:
                    delay_s = core.leftovers[key][1]
                    due_ns = core.now_ns() + int(delay_s * 1e9)
                    core.leftovers[key] = due_ns, min(2 * delay_s, _RETRY_MAX_S)
        else:
            self._directory.forget_discarded(*key)
            with core.changed:
                core.leftovers.pop(key, None)

    def _upload(self, entry: Entry) -> None:
        core = self._core
        error: BaseException | None = None
        stored = False
        try:
            stored = self._copy(entry)
        except (FlashwarpError, OSError, MemoryError) as failure:
            error = failure
        with core.changed:
            # From here on a discard removes the copy itself.
            core.uploading = None
            gone = entry.discarded
            if not gone and error is None:
                entry.remote = True
                core.in_remote.add(entry.key)
                core.leftovers.pop(entry.key, None)
                core.remote_failures.pop(entry, None)
                core.counts["uploads"] += stored
            elif not gone and error is not None:
                core.remote_failures[entry] = error
                retry_later(core, "remote", entry)
                _log.warning("%s is not in the remote store, and tried again: %s", entry, error)
        if gone:
            self._take_back(entry)
        with core.changed:
            release(core, entry)
            core.wake()

    def _take_back(self, entry: Entry) -> None:
        """Remove what was stored of a version that was discarded meanwhile."""
        core = self._core
        try:
            # First, as in `Storing.remove`.
            self._directory.note_discarded(entry.key[0], [entry.key[1]])
            forget_stored(self._remote, *entry.key)
        except (FlashwarpError, OSError) as error:
            _log.info("%s stays in the remote store: %s", entry, error)
            with core.changed:
                core.leftovers[entry.key] = 0, core.settings.retry_s
        else:
            self._directory.forget_discarded(*entry.key)

    def _copy(self, entry: Entry) -> bool:
        """Copy a version; return False if the remote store had it."""
        began_ns = self._core.now_ns()
        with self._directory.open(*entry.key) as reader:
            # Another version of this number may be there, of an earlier run or a store that failed.
            stored = self._remote.upload(_Wanted(reader, entry), replace=True)
        self._directory.forget_discarded(*entry.key)
        if stored:
            self._core.mover.moved("to remote", entry.data_bytes, began_ns)
        return bool(stored)


class _Wanted:
    """A reader of a version, whose reads fail once the version is discarded."""

    def __init__(self, reader: Any, entry: Entry) -> None:
        self._reader, self._entry = reader, entry

    def read_into(self, region: Any, offset: int, buffer: Any) -> None:
        if self._entry.discarded:
            raise CheckpointError(f"{self._entry} is not needed any more")
        self._reader.read_into(region, offset, buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def release(core: Core, entry: Entry) -> None:
    """End the work of a background thread on a version; called under the lock."""
    core.busy[entry] -= 1
    if core.busy[entry] <= 0:
        del core.busy[entry]
    core.wake("prefetch")


def note_failure(core: Core, queue: str, entry: Entry, error: BaseException) -> None:
    """Keep a failed flush for its future and for another try; called under the lock."""
    full = getattr(error, "errno", None) in _FULL
    first = entry.failure is None
    core.failed_now(entry, error)
    retry_later(core, queue, entry)
    if first:
        _log.warning(
            "%s could not be written and stays in the caches; %s: %s",
            entry,
            "the disk is full, and the run goes on from the upper tiers" if full else "tried again",
            error,
        )


def retry_later(core: Core, queue: str, entry: Entry) -> None:
    """Try a failed flush again after a while, each time after twice the time.

    A flush that began before room was made is tried again at once: it did not see the room.
    """
    _, delay_s = core.retries.get((queue, entry), (0, core.settings.retry_s / 2))
    delay_s = min(delay_s * 2, max(_RETRY_MAX_S, core.settings.retry_s))
    at_once = queue != "remote" and entry.failed_ns <= core.room_made_ns
    core.retries[queue, entry] = (
        0 if at_once else core.now_ns() + int(delay_s * 1e9),
        core.settings.retry_s / 2 if at_once else delay_s,
    )


def retry_now(core: Core, failed_before_ns: int) -> None:
    """Make failed flushes due that began before a time; called under the lock."""
    for (queue, entry), (_, delay_s) in list(core.retries.items()):
        if entry.failed_ns < failed_before_ns:
            core.retries[queue, entry] = 0, delay_s
    core.wake()


def note_room(core: Core) -> None:
    """Try failed flushes again, because the disk may have room now; called under the lock."""
    core.room_made_ns = core.now_ns()
    for key in core.retries:
        core.retries[key] = 0, core.settings.retry_s / 2
    core.wake()


def queue_due_retries(core: Core, queue: str) -> None:
    """Queue the failed flushes whose time has come; called under the lock."""
    now_ns = core.now_ns()
    for (name, entry), (due_ns, delay_s) in list(core.retries.items()):
        if name != queue or due_ns > now_ns:
            continue
        waiting = core.queues[queue]
        if entry in waiting:
            continue
        # Not due again before it was tried: the outcome sets or removes it.
        core.retries[name, entry] = now_ns + (1 << 62), delay_s
        tier = next((each for each in core.tiers if each.name == queue), None)
        if tier is None:
            waiting.append(entry)
            continue
        life = tier.life(entry)
        if life is None or Fact.DURABLE_BELOW in life.facts:
            del core.retries[name, entry]
        else:
            core.queue_flush(tier, entry)
