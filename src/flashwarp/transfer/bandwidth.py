"""How fast a link has been: bytes and nanoseconds of its last transfers, in integers."""

from __future__ import annotations

import time
from collections.abc import Callable

from flashwarp import endings
from flashwarp.config import integer

_NS_A_SECOND = 1_000_000_000

# A new transfer counts as much as all before it once these are this many times its length.
_SHARE = 8

_MOST = 1 << 63


class LinkBandwidth:
    """The bandwidth of one link, measured from transfers that were made anyway.

    The rate is a mean in which each transfer's weight falls by an eighth with every later one, so
    it follows a link that others begin to use within about twenty transfers. Any thread may call.

    Parameters
    ----------
    name : str
        What is measured, for people.
    clock : callable, optional
        Nanoseconds of a clock that never jumps. Default: the monotonic clock, on which changes of
        the date have no effect.

    Examples
    --------
    >>> from flashwarp.transfer import LinkBandwidth
    >>> link = LinkBandwidth("to the GPU")
    >>> link.bytes_per_second is None
    True
    >>> link.record(nbytes=4096, nanoseconds=1024)
    >>> link.bytes_per_second
    4000000000
    >>> link.nanoseconds_for(8192)
    2048
    """

    def __init__(self, name: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.name = name
        self._clock = clock
        self._lock = endings.Lock()
        # Scaled by `_SHARE`, so that small sums do not vanish in the division.
        self._bytes = 0
        self._ns = 0
        self._measured_ns: int | None = None
        self._transfers = 0
        self._unmeasurable = 0

    def record(self, nbytes: int, nanoseconds: int) -> None:
        """Count a transfer. What took no measurable time, or less, changes no rate."""
        integer("nbytes", nbytes, 0, _MOST)
        with self._lock:
            if nanoseconds <= 0 or nbytes == 0:
                self._unmeasurable += 1
                return
            self._bytes += nbytes * _SHARE - self._bytes // _SHARE
            self._ns += nanoseconds * _SHARE - self._ns // _SHARE
            self._measured_ns = self._clock()
            self._transfers += 1

    @property
    def transfers(self) -> int:
        """Transfers that were counted."""
        return self._transfers

    @property
    def unmeasurable(self) -> int:
        """Transfers without bytes or without a time, which were left out."""
        return self._unmeasurable

    @property
    def bytes_per_second(self) -> int | None:
        """The rate; None before the first transfer."""
        with self._lock:
            return self._bytes * _NS_A_SECOND // self._ns if self._ns else None

    def nanoseconds_for(self, nbytes: int) -> int | None:
        """Return how long a transfer will take at this rate; None before the first transfer."""
        integer("nbytes", nbytes, 0, _MOST)
        with self._lock:
            return -(-nbytes * self._ns // self._bytes) if self._bytes else None

    @property
    def age_ns(self) -> int | None:
        """Nanoseconds since the last transfer was counted; None before the first one."""
        with self._lock:
            if self._measured_ns is None:
                return None
            # A clock that was given may still jump back.
            return max(0, self._clock() - self._measured_ns)

    def __repr__(self) -> str:
        rate, age = self.bytes_per_second, self.age_ns
        if rate is None or age is None:
            return f"<LinkBandwidth {self.name}: not measured yet>"
        return f"<LinkBandwidth {self.name}: {rate / 1e9:.2f} GB/s, {age / 1e9:.1f} s ago>"
