"""The way of a new version into the fastest place that takes it, and copies that end later.

On the CPU a copy is made by the thread that asks for it. On a GPU it is queued in the order of the
user's stream, and a thread of the stager notes its end. Overlapped checkpoints are made by that
thread too, in their order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from flashwarp import endings
from flashwarp.checkpoint.capture import Bytes
from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.directory import VersionWriter
from flashwarp.checkpoint.life import Event
from flashwarp.checkpoint.mover import Pending
from flashwarp.checkpoint.storing import Storing
from flashwarp.checkpoint.tier import Entry, Tier
from flashwarp.checkpoint.workers import Crew
from flashwarp.errors import CheckpointError, ClosedError

_log = logging.getLogger(__name__)


class Stager:
    """Brings versions into the caches.

    Parameters
    ----------
    core : Core
        The checkpointer's state.
    storing : Storing
        Writes to storage, for versions that no cache can take.
    """

    def __init__(self, core: Core, storing: Storing) -> None:
        self._core = core
        self._storing = storing
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0
        self._errors: list[BaseException] = []
        self._crew = Crew("staging", core.mover.crew.lock)
        core.serve("stage", self._crew, self._next_job)

    def stage(self, entry: Entry, sources: list[Bytes], *, overlap: bool) -> None:
        """Bring a version into a cache, or into storage; with `overlap`, return before."""
        if overlap:
            self._later(partial(self._stage_later, entry, sources))
        else:
            self._stage(entry, sources, ordered=True)

    def settle(
        self,
        pending: Pending,
        arrays: list[Bytes],
        end: Callable[[bool], None],
        *,
        ordered: bool = True,
    ) -> None:
        """Call `end` once, when copies from or to a user's arrays are over, or have failed.

        If `ordered`, later work on the arrays' streams waits for them, and the caller does not. A
        signal can come before `end` is handed over, so the caller ends what it then still finds.
        """
        if not pending:
            end(True)
        elif not ordered:
            self._settle(pending, arrays, end)
        else:
            for stream in _streams(arrays):
                pending.before(stream)
            self._later(partial(self._settle, pending, arrays, end))

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is under way; raises the first error that nobody has seen."""
        core = self._core
        with core.locked():
            core.wait_for(
                lambda: self._under_way() == 0,
                lambda: f"{self._under_way()} copies of protected arrays have not ended",
                timeout_s,
            )
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _under_way(self) -> int:
        return len(self._jobs) + self._running

    def stop(self, timeout_s: float) -> list[BaseException]:
        """End the thread; return errors that nobody has seen."""
        self._crew.stop()
        self._crew.join(timeout_s)
        return self._errors

    # In the thread.

    def _later(self, job: Callable[[], None]) -> None:
        with self._core.changed:
            self._jobs.append(job)  # a signal after it may delay it until the next call
            self._core.wake("stage")

    def _next_job(self) -> Callable[[], None] | None:
        if not self._jobs:
            return None
        self._running += 1
        return partial(self._run, self._jobs.popleft())

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            _log.warning("a copy of protected arrays failed: %s", error)
            with self._core.changed:
                self._errors.append(error)
        finally:
            with self._core.changed:
                self._running -= 1
                self._core.changed.notify_all()

    def _stage_later(self, entry: Entry, sources: list[Bytes]) -> None:
        try:
            self._stage(entry, sources, ordered=False)
        except Exception as error:
            self._lose(entry, error)
            raise
        finally:
            with self._core.changed:
                self._core.staging.discard(entry)
                self._core.changed.notify_all()

    def _lose(self, entry: Entry, error: BaseException) -> None:
        """Note that a version was never copied out of the user's arrays."""
        core = self._core
        with core.changed:
            core.failed_now(entry, error)
            future = core.futures.pop(entry, None)
            if future is not None:
                future.observed = True  # the next wait raises it
            core.retire(entry)

    def _settle(self, pending: Pending, held: object, end: Callable[[bool], None]) -> None:
        del held  # the arrays live until here
        try:
            pending.wait(self._core.settings.timeout_s)
        except BaseException:
            end(False)
            raise
        end(True)

    # Staging.

    def _stage(self, entry: Entry, sources: list[Bytes], *, ordered: bool) -> None:
        core = self._core
        pending: Pending | None = None
        try:
            tier = self._place(entry)
            if tier is not None:
                pending = core.mover.capture(sources, tier, entry)
                end = partial(self._end_stage, tier, entry)
                self.settle(pending, sources, end, ordered=ordered)
        except BaseException:
            # Also a signal between two lines. What a copy still writes comes before the copies of
            # the block's next version.
            with core.changed:
                core.whole(partial(self._empty, entry))
            raise
        if tier is None or pending is None:
            self._store(entry, sources)

    def _empty(self, entry: Entry) -> None:
        for each in self._core.tiers:
            if each.holds(entry):
                return  # its copy is over, and what fills the tiers below is a flush
            if each.filling(entry):
                self._core.apply(each, entry, Event.FILL_FAILED)

    def _end_stage(self, tier: Tier, entry: Entry, done: bool) -> None:
        core = self._core
        with core.changed:
            if not tier.filling(entry):
                return  # a signal has ended the call, and emptied the block
            if done:
                core.whole(partial(core.filled, tier, entry))
                return
            core.apply(tier, entry, Event.FILL_FAILED)
        self._lose(entry, CheckpointError(f"{entry} was not copied into the {tier.name} cache"))

    def _place(self, entry: Entry) -> Tier | None:
        core = self._core
        with core.changed:
            for tier in core.tiers:
                if core.acquire(tier, entry, Event.WRITE, core.settings.timeout_s):
                    return tier
                core.counts["full_bypassed"] += tier.fits(entry.nbytes)
        return None

    def _store(self, entry: Entry, sources: list[Bytes]) -> None:
        """Write a version that no cache can take."""
        stopped: list[bool] = []

        def store(writer: VersionWriter, wanted: Callable[[], bool]) -> bool:
            if wanted() and not stopped:
                self._core.mover.store_arrays(sources, writer)
            return wanted()

        core = self._core
        outcome: list[tuple[bool, BaseException | None]] = []

        def end(done: bool, error: BaseException | None) -> None:
            with core.changed:
                outcome.append((done, error))
                core.wake()

        write = partial(self._storing.write, entry, store, end)
        endings.aside(write, partial(stopped.append, True))
        with core.changed:
            # Other ranks may have to agree, which has a limit of its own.
            core.wait_for(
                lambda: bool(outcome),
                lambda: f"{entry} waits for other ranks",
                2 * core.settings.timeout_s,
            )
        done, error = outcome[0]
        if error is not None:
            raise error
        if not done and not entry.discarded:
            raise ClosedError(f"the checkpointer was closed while {entry} was written")


def _streams(arrays: list[Bytes]) -> list[object]:
    found = {repr(each.stream): each.stream for each in arrays if each.stream is not None}
    return list(found.values())
