"""The streams on which arrays of a cache may have work, and who asks the driver about one of them.

The driver crashes if a thread asks about a stream that was destroyed. So a stream is destroyed only
once no thread asks about it. No lock is held meanwhile: a wait for a stream that runs for long
delays the end of no other stream.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashwarp._waiting import until
from flashwarp.config import time_limit_s

if TYPE_CHECKING:
    from flashwarp.device import OwnedStream
    from flashwarp.transfer import DeviceQueue

_log = logging.getLogger(__name__)


class _Asker:
    """A thread that asks about a stream; one that a signal handler has ended is lost with it."""


class NotedStreams(set[int]):
    """Handles of streams. Any thread may call."""

    def __init__(self) -> None:
        super().__init__()
        self._askers: dict[int, weakref.WeakSet[_Asker]] = {}
        self._late: list[object] = []

    @contextlib.contextmanager
    def asking(self, stream: int, noted: set[int] | None = None) -> Iterator[bool]:
        """Yield whether a stream is noted, here or elsewhere; then it stays while it is asked."""
        asker, askers = _Asker(), self._askers.setdefault(stream, weakref.WeakSet())
        # Before the look: who ends a stream first takes it out, and then looks for askers.
        askers.add(asker)
        try:
            # Others of its number may have come and gone since: these are not asked about.
            counted = self._askers.get(stream) is askers
            yield counted and stream in (self if noted is None else noted)
        finally:
            askers.discard(asker)

    def end(self, stream: OwnedStream | DeviceQueue, *noted: set[int]) -> None:
        """Take a stream out, of these sets too, and destroy it once nobody asks about it.

        It is done, or nobody waits for it any more.
        """
        for each in (self, *noted):
            each.discard(stream.handle)
        askers = self._askers.pop(stream.handle, ())
        waited = until(lambda: not askers, time_limit_s())
        if waited is None:
            stream.close()
            return
        self._late.append(stream)  # the device destroys it
        _log.warning(
            "stream %#x is kept, because a thread has waited for it for %.0f s",
            stream.handle,
            waited,
        )
