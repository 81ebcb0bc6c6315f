"""`Copy`: a copy under way, what it comes after, and the copier that runs it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

from flashwarp import _waiting
from flashwarp.config import time_limit_s
from flashwarp.device import stream_handle
from flashwarp.errors import DeviceTimeout, FlashwarpError

Piece = tuple[int, int, int]
"""Target and source address, and bytes."""


class Direction(enum.Enum):
    """Where a copy goes; each has a stream of its own, so they run beside each other."""

    TO_DEVICE = "to device"
    TO_HOST = "to host"
    WITHIN = "within the device"


class Copier(Protocol):
    """The copies of one direction, in order."""

    def submit(self, copy: Copy, pieces: Sequence[Piece], after: After) -> None:
        """Queue a copy and enter it; raises if it cannot be queued."""

    def sweep(self) -> None:
        """Note which copies have ended. Never waits."""

    def in_flight(self) -> int:
        """Count the copies that have not ended."""

    def order_before(self, copy: Copy, stream: int) -> None:
        """Make later work on a stream wait for a copy."""

    def take_failures(self) -> list[FlashwarpError]:
        """Return errors that nobody has seen, and forget them."""

    def close(self) -> None:
        """Release everything. Copies that have not begun may be withdrawn."""


class After:
    """What a copy comes after: streams of the device, and copies of this engine."""

    def __init__(self, streams: Iterable[int], copies: Iterable[Copy]) -> None:
        self.streams = tuple(dict.fromkeys(streams))
        self.copies = tuple(each for each in copies if not each.over())


class Copy:
    """One copy under way, of one piece or of many. Any thread may use it.

    It keeps the memory of both sides allocated until the copy has ended. An error is kept until
    `done`, `wait` or `error` has shown it; one that nobody saw is raised when the engine is closed.

    Attributes
    ----------
    nbytes : int
        Bytes of all pieces.
    direction : Direction
        Where it goes.
    """

    def __init__(self, copier: Copier, direction: Direction, nbytes: int, owners: object) -> None:
        self.direction = direction
        self.nbytes = nbytes
        self.seen = False
        # For the copier: its number, and its event if it has one.
        self.number = 0
        self.event = 0
        self.begin = 0
        self._owners = owners
        # Why the driver refused a part of it, while the rest is in flight.
        self.refusal: FlashwarpError | None = None
        self.copier = copier
        self._over = False
        self._error: FlashwarpError | None = None

    def over(self) -> bool:
        """Return whether it has ended, well or not. Never blocks, and raises no error of it."""
        if not self._over:
            self.copier.sweep()
        return self._over

    def done(self) -> bool:
        """Return whether it has ended. Never blocks; raises what it has failed with."""
        if not self.over():
            return False
        self._raise()
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it has ended. Raises what it has failed with, or DeviceTimeout."""
        limit_s = time_limit_s(timeout_s)
        waited = _waiting.until(self.over, limit_s)
        if waited is not None:
            raise DeviceTimeout(
                f"a copy of {self.nbytes} bytes {self.direction.value} has not ended after "
                f"{waited:.1f} s (limit {limit_s:g} s): the work that it comes after still runs, "
                "or a word that its stream waits for was not stored"
            )
        self._raise()

    @property
    def error(self) -> FlashwarpError | None:
        """What it has failed with; None if it has not ended, or went well."""
        if not self.over():
            return None
        self.seen = True
        return self._error

    def before(self, stream: object) -> None:
        """Make later work on a stream of the device wait for the copy. Never blocks.

        Does not look at an error: `wait` or `done` shows it.
        """
        if not self.over():
            self.copier.order_before(self, stream_handle(stream))

    def end(self, error: FlashwarpError | None) -> None:
        """For the copier: note the end. The first one counts."""
        if not self._over:
            self._error = error
            self._owners = None
            self._over = True

    def _raise(self) -> None:
        self.seen = True
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "in flight" if not self._over else "failed" if self._error else "ended"
        return f"<Copy of {self.nbytes} bytes {self.direction.value}, {state}>"
