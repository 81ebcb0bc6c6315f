"""Restores: from the fastest place that has a version, straight into the user's arrays.

A restore needs no room in any cache, so it waits for nobody but a copy that brings its version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flashwarp import endings
from flashwarp.checkpoint.capture import Bytes
from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.life import Event
from flashwarp.checkpoint.mover import Pending
from flashwarp.checkpoint.storing import Storing
from flashwarp.checkpoint.tier import Entry, Tier
from flashwarp.errors import MissingVersionError


@dataclass(eq=False)
class Restore:
    """One restore of a version. It reads from `tier`; None: from storage."""

    entry: Entry
    tier: Tier | None = None
    reads: bool = False


class Restorer:
    """Restores of one checkpointer."""

    def __init__(self, core: Core, storing: Storing) -> None:
        self._core = core
        self._storing = storing

    def _note(self, entry: Entry) -> None:
        """Count a restore that begins, and close its hint."""
        core = self._core
        fastest = core.tiers[0] if core.tiers else None
        ready = fastest is not None and fastest.holds(entry)
        core.interval.note(core.now_ns())
        given_up = core.hints.restored(entry.key, ready=ready)
        core.counts["restarts"] += 1
        core.counts["prefetch_distance"] += core.prefetched_ahead()
        if core.settings.restart_prefetches:
            core.started = True
        # If the version is here, the end of the restore wakes prefetches, not its beginning: until
        # then they would find no room, and keep the restore from the lock.
        core.refresh(entry.key, wake=not ready)
        for hint in given_up:
            assert isinstance(hint.key, tuple)
            core.give_up_hint(hint.key)

    def begin(self, restore: Restore) -> None:
        """Choose where to read a version, and begin to; called under the lock."""
        core, entry = self._core, restore.entry
        core.whole(partial(self._note, entry))
        if core.tier_of(entry) is None and core.is_filling(entry):
            core.wait_for(
                lambda: core.tier_of(entry) is not None or not core.is_filling(entry),
                lambda: f"{entry} is still being copied into the caches",
            )
        core.whole(partial(self._begin, restore))

    def _begin(self, restore: Restore) -> None:
        core, entry = self._core, restore.entry
        tier = restore.tier = core.tier_of(entry)
        if tier is not None:
            core.apply(tier, entry, Event.READ)
            core.counts[f"restarts_{tier.name}"] += 1
        elif entry.stored:
            core.storage_reads.add(restore)
            core.counts["restarts_ssd"] += 1
        else:
            raise MissingVersionError(f"{entry} is neither in the caches nor stored")
        restore.reads = True

    def read(self, restore: Restore, targets: list[Bytes]) -> Pending:
        """Copy regions into the user's arrays, from a tier or from storage."""
        if restore.tier is not None:
            return self._core.mover.deliver(restore.tier, restore.entry, targets)
        stopped: list[bool] = []
        load = partial(self._core.mover.load_arrays, targets=targets, wanted=lambda: not stopped)
        read = partial(self._storing.read, restore.entry, load)
        endings.aside(read, partial(stopped.append, True))
        return Pending()

    def end(self, restore: Restore, *, done: bool) -> None:
        """Note the end of a restore, if it has begun and not ended; called under the lock."""
        self._core.whole(partial(self._end, restore, done))

    def _end(self, restore: Restore, done: bool) -> None:
        core, entry, tier = self._core, restore.entry, restore.tier
        reads, restore.reads = restore.reads, False
        if not reads:
            return
        if tier is not None:
            core.apply(tier, entry, Event.READ_DONE if done else Event.READ_FAILED)
        else:
            core.end_storage_read(restore)
        if not done:
            return
        entry.unreadable = False
        for other in core.tiers:
            if other is not tier:
                core.apply_if(other, entry, Event.SERVED_ELSEWHERE)
