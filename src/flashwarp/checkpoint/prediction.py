"""What is expected: when the next restores come, and when a link has moved what is queued on it.

All times are integers of nanoseconds on the monotonic clock, which no change of the date moves. A
clock that jumps back all the same makes one estimate late, and no estimate negative.
"""

from __future__ import annotations

from collections.abc import Hashable

from flashwarp.transfer import LinkBandwidth

# A new interval counts for a quarter: the estimate follows a change within about ten restores.
_SHARE = 4


class RestoreInterval:
    """The time from one restore to the next, as the application has shown it so far.

    Examples
    --------
    >>> interval = RestoreInterval()
    >>> for now_ns in (0, 1000, 2000):
    ...     interval.note(now_ns)
    >>> interval.estimate_ns
    1000
    """

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._estimate_ns: int | None = None

    def note(self, now_ns: int) -> None:
        """Note that a restore begins."""
        last, self._last_ns = self._last_ns, now_ns
        if last is None or now_ns < last:
            return
        sample = now_ns - last
        if self._estimate_ns is None:
            self._estimate_ns = sample
        else:
            self._estimate_ns += (sample - self._estimate_ns) // _SHARE

    @property
    def estimate_ns(self) -> int | None:
        """Nanoseconds between two restores; None before the second."""
        return self._estimate_ns


class Backlog:
    """Transfers that are queued on one link, in their order. Not thread-safe.

    The paper's ``predict_evictable``: a flush ends when the bytes before it and its own have moved
    over the link.

    With `in_order`, transfers begin in the order of `add`. Otherwise each is expected to be the
    next.
    """

    def __init__(self, link: LinkBandwidth, *, in_order: bool = True) -> None:
        self.link = link
        self.in_order = in_order
        self._queued: dict[Hashable, int] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, key: Hashable, nbytes: int) -> None:
        """Append a transfer."""
        self.remove(key)
        self._queued[key] = nbytes
        self.nbytes += nbytes

    def remove(self, key: Hashable) -> None:
        """Remove a transfer that has ended, or will not happen."""
        self.nbytes -= self._queued.pop(key, 0)

    def ends_ns(self, now_ns: int) -> int | None:
        """Return when all of it will have ended; None if the bandwidth is not known."""
        takes = self.link.nanoseconds_for(self.nbytes)
        return None if takes is None else now_ns + takes

    def deadlines(self, now_ns: int) -> dict[Hashable, int]:
        """Return when each transfer will have ended; empty if the bandwidth is not known."""
        found: dict[Hashable, int] = {}
        total = 0
        for key, nbytes in self._queued.items():
            total = total + nbytes if self.in_order else nbytes
            takes = self.link.nanoseconds_for(total)
            if takes is None:
                return {}
            found[key] = now_ns + takes
        return found
