"""Which versions leave a cache for a new one: the gap-aware score, and LRU and FIFO to compare.

The score is Algorithm 1 of the paper (Maurya et al., HPDC '23, section 4.2) with its defects
corrected. A window is a run of neighbouring fragments, versions and gaps, with room for the new
version. The score compares windows by three integers, in this order:

1. the wait in ns until the last fragment of the window can be evicted (less is better). The paper
   adds the waits up; but flushes share one link, and the deadlines here are those of the queue, so
   the longest wait is the wait for all;
2. the urgency of the fragment that is needed soonest (later is better). The paper adds up prefetch
   distances, so that four versions needed soon would look as good as one needed late;
3. the bytes of versions that are evicted (fewer is better).

Urgency is the number of a hint in the restore queue, which does not change when the queue moves.
Versions without a hint come after all hints, the last used first; consumed versions after these,
and gaps last. Deadlines are absolute, on the monotonic clock: a duration would be stale.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from flashwarp import _native
from flashwarp.checkpoint.buffer import GAP, NEVER_NS, FragmentTable, Window
from flashwarp.errors import ArgumentError


class Urgency(enum.IntEnum):
    """Bases of urgencies: the larger, the sooner given up. See `consumed`, `unhinted`."""

    KEEP_NONE = -1
    # Numbers of hints and uses stay far below 2**60: at a million a second for 36,000 years.
    UNHINTED = 1 << 61
    CONSUMED = 1 << 62

    @staticmethod
    def hinted(number: int) -> int:
        """Return the urgency of a version by the number of its hint."""
        return number

    @staticmethod
    def unhinted(used: int) -> int:
        """Return the urgency of a version that no hint names; `used` numbers its last use."""
        return Urgency.UNHINTED - used

    @staticmethod
    def consumed(used: int) -> int:
        """Return the urgency of a consumed version that no hint names."""
        return Urgency.CONSUMED - used


class Policy(ABC):
    """Chooses which fragments a new version takes. Changes nothing, and waits for nothing."""

    name: str

    @abstractmethod
    def choose(
        self,
        table: FragmentTable,
        nbytes: int,
        now_ns: int,
        keep_urgency: int = -1,
    ) -> Window | None:
        """Return the best window, or None if no wait that the caller may wait leads to one.

        Parameters
        ----------
        table : FragmentTable
            The fragments.
        nbytes : int
            Bytes of the new version.
        now_ns : int
            The monotonic clock.
        keep_urgency : int
            Versions needed as soon as this, or sooner, are not given up. A prefetch passes the
            urgency of what it fetches.

        Notes
        -----
        What a hint has pinned is never chosen: the thread that would wait for its restore may be
        the one to make it.
        """


class Score(Policy):
    """The gap-aware sliding-window score; see the top of this module. O(fragments)."""

    name = "score"

    def choose(
        self,
        table: FragmentTable,
        nbytes: int,
        now_ns: int,
        keep_urgency: int = -1,
    ) -> Window | None:
        """Return the best window; `Policy.choose` describes the parameters."""
        _, sizes, ready_ns, urgency, pinned, _ = table.columns()
        found = _native.best_window(
            sizes,
            ready_ns,
            urgency,
            pinned,
            size=nbytes,
            now_ns=now_ns,
            keep_urgency=keep_urgency,
        )
        return None if found is None else Window(*found)


class _ByAge(Policy):
    """Gives up versions in one order, whatever hints say, until they leave enough room.

    Of versions that cannot be evicted yet, it waits for those that come first in the order. It
    keeps what `keep_urgency` and pins protect: these are conditions, not preferences.
    """

    def choose(
        self,
        table: FragmentTable,
        nbytes: int,
        now_ns: int,
        keep_urgency: int = -1,
    ) -> Window | None:
        """Return the window that is free first in this order; see `Policy.choose`."""
        _, sizes, ready_ns, urgency, pinned, _ = table.columns()
        usable = (ready_ns != NEVER_NS) & (urgency > keep_urgency) & (pinned == 0)
        gaps = urgency == GAP
        taken = gaps & usable
        order = [index for index in np.argsort(self.age(table), kind="stable") if usable[index]]
        for added in [None, *(index for index in order if not gaps[index])]:
            if added is not None:
                taken[added] = True
            window = _window_in(sizes, taken, nbytes, added)
            if window is not None:
                first, last = window
                waits = np.maximum(ready_ns[first:last] - now_ns, 1)[ready_ns[first:last] != 0]
                return Window(
                    first,
                    last,
                    int(waits.max(initial=0)),
                    int(urgency[first:last].min()),
                    int(sizes[first:last][~gaps[first:last]].sum()),
                )
        return None

    @abstractmethod
    def age(self, table: FragmentTable) -> list[int]:
        """Return a number for each fragment; the smallest goes first."""


def _window_in(
    sizes: object, taken: object, nbytes: int, added: int | None
) -> tuple[int, int] | None:
    """Return the shortest run of taken fragments that is large enough and has `added` in it."""
    size, free = np.asarray(sizes), np.asarray(taken)
    best: tuple[int, int] | None = None
    first = total = 0
    for last in range(len(size)):
        if not free[last]:
            first, total = last + 1, 0
            continue
        total += int(size[last])
        while total - int(size[first]) >= nbytes:
            total -= int(size[first])
            first += 1
        has_it = added is None or first <= added <= last
        if total >= nbytes and has_it and (best is None or last + 1 - first < best[1] - best[0]):
            best = first, last + 1
    return best


class LRU(_ByAge):
    """Gives up the version that was used longest ago."""

    name = "lru"

    def age(self, table: FragmentTable) -> list[int]:
        """Return the number of each fragment's last use."""
        return [int(used) for used in table.columns()[5]]


class FIFO(_ByAge):
    """Gives up the version that came first."""

    name = "fifo"

    def age(self, table: FragmentTable) -> list[int]:
        """Return the order in which the fragments' versions came."""
        return [table.arrival(key) for key in table.owners()]


_POLICIES: dict[str, Callable[[], Policy]] = {"score": Score, "lru": LRU, "fifo": FIFO}


def policy_of(name: str) -> Policy:
    """Return a policy by its name: "score", "lru" or "fifo"."""
    if name not in _POLICIES:
        raise ArgumentError(f"eviction={name!r} is none of {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name]()
