"""Prefetches: into each cache, in the order of the hints, from the next slower place.

A prefetch takes only room that is free now, and evicts nothing that is needed before what it
fetches. What it fetched, or found, stays pinned until a restore has consumed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from flashwarp.checkpoint.core import Core, hint_key
from flashwarp.checkpoint.eviction import Urgency
from flashwarp.checkpoint.flushing import release
from flashwarp.checkpoint.hints import Hint
from flashwarp.checkpoint.life import Event
from flashwarp.checkpoint.storing import Storing, wanted
from flashwarp.checkpoint.tier import Entry, Tier
from flashwarp.errors import FlashwarpError, MissingVersionError

_log = logging.getLogger(__name__)


class Prefetcher:
    """Prefetches into a tier, one at a time.

    From storage there are two: one reads the last pieces of a version while the other opens the
    next one. Else the disk would be idle for as long as some pieces take.

    `reading` has the versions whose last pieces are not on their way yet; the prefetches of the
    tier share it.
    """

    def __init__(
        self,
        core: Core,
        tier: Tier,
        below: Tier | None,
        storing: Storing,
        reading: set[Entry],
    ) -> None:
        self._core = core
        self._tier = tier
        self._below = below
        self._storing = storing
        self._reading = reading
        self._reads = False

    def next_job(self) -> Callable[[], None] | None:
        """Return the next prefetch; called under the lock. Pins what is in the tier already."""
        core, read_before = self._core, self._reads
        self._reads = False
        job = self._choose()
        # Only now: a flush or a removal would begin between two reads of storage.
        if self._reads:
            core.storage_reads.add(self)
        elif read_before:
            core.end_storage_read(self)
        return job

    def _choose(self) -> Callable[[], None] | None:
        core, tier = self._core, self._tier
        if not core.started or core.closing or tier.demanded:
            return None
        for hint in core.lookahead():
            entry = core.entries.get(hint_key(hint))
            if entry is None or entry.discarded:
                continue  # the version does not exist yet, or never will
            if self._is_above(entry):
                continue  # a restore takes it from there
            if tier.life(entry) is not None:
                core.pin(tier, entry)
                continue
            if not tier.fits(entry.nbytes) or not self._has_source(entry):
                continue
            job = self._job(hint, entry)
            if job is None:
                return None  # later hints must not take the room that this one waits for
            return job
        return None

    def _is_above(self, entry: Entry) -> bool:
        """Return whether a faster tier has a version, or soon will."""
        for tier in self._core.tiers:
            if tier is self._tier:
                return False
            if tier.life(entry) is not None:
                return True
        return False

    def _has_source(self, entry: Entry) -> bool:
        """Return whether a slower place has a version, or soon will."""
        if self._below is not None and self._below.life(entry) is not None:
            return True
        return entry.stored and not entry.unreadable

    def _job(self, hint: Hint, entry: Entry) -> Callable[[], None] | None:
        core, below = self._core, self._below
        keep = Urgency.hinted(hint.number)
        source = below if below is not None and below.holds(entry) else None
        if source is None and below is not None and self._comes_by(below, entry, keep):
            return None
        if source is None and self._reading:
            return None  # which of two comes first would not be theirs to say
        if not core.try_acquire(self._tier, entry, Event.FETCH, keep):
            return None
        core.busy[entry] += 1
        self._reads = source is None
        if source is None:
            self._reading.add(entry)
        core.pin(self._tier, entry)
        if source is not None:
            core.apply(source, entry, Event.READ)
        return partial(self._fetch, entry, source)

    def _comes_by(self, below: Tier, entry: Entry, keep: int) -> bool:
        """Return whether the next slower cache fetches a version, so that this one need not."""
        if below.life(entry) is not None:
            return True
        window = below.choose(entry.nbytes, self._core.now_ns(), keep)
        return window is not None and window.wait_ns == 0

    def _fetch(self, entry: Entry, source: Tier | None) -> None:
        core, tier = self._core, self._tier
        error: BaseException | None = None
        done = False
        try:
            done = self._copy(entry, source)
        except (FlashwarpError, OSError, MemoryError) as failure:
            error = failure
        with core.changed:
            self._reading.discard(entry)
            if done:
                core.apply(tier, entry, Event.SAVED_BELOW)
                core.apply(tier, entry, Event.FILLED)
                core.counts[f"prefetches_{tier.name}"] += 1
            else:
                core.apply(tier, entry, Event.FILL_FAILED)
            if source is not None:
                core.apply(source, entry, Event.PROMOTED if done else Event.READ_FAILED)
            release(core, entry)
            if isinstance(error, MissingVersionError) and not entry.discarded:
                # Another process has discarded it, or written it again: a look at it says which.
                core.retire(entry, keep_hints=True)
                core.look = True
                core.wake("look")
            elif error is not None and not entry.discarded:
                entry.unreadable = True
                core.counts["prefetch_failures"] += 1
                _log.warning("%s could not be prefetched: %s", entry, error)

    def _copy(self, entry: Entry, source: Tier | None) -> bool:
        mover = self._core.mover
        needed = partial(wanted, self._core, entry)
        if source is not None:
            return mover.move(source, self._tier, entry, needed)
        with self._storing.open(entry.key, entry.identity) as reader:
            return mover.load_block(
                self._tier, entry, reader, needed, partial(self._let_next_begin, entry)
            )

    def _let_next_begin(self, entry: Entry) -> None:
        """Note that the last bytes of a version are on their way from the disk."""
        with self._core.changed:
            self._reading.discard(entry)
            self._core.wake("prefetch")
