"""The allocation table of one cache tier: one contiguous buffer, cut into versions and gaps.

Fragments lie in address order and cover the buffer without overlap, and two gaps are never
neighbours. The table holds no bytes and no locks: `Tier` has the memory, the checkpointer the lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashwarp import _native
from flashwarp.device.memory import align_up

ALIGNMENT = 4096
"""Blocks begin at multiples of so many bytes, so that storage writes them past the page cache."""

NEVER_NS: int = _native.NEVER_NS
GAP: int = _native.URGENCY_OF_GAP

_COLUMNS = 6
_ROWS_FIRST = 64


@dataclass(frozen=True)
class Window:
    """Fragments [first, last) that a new version may take."""

    # Indices in the table, valid until it changes.
    first: int
    last: int
    wait_ns: int  # expected time until all of them can be evicted; 0: now
    urgency: int  # of the version among them that is needed soonest
    evicted_bytes: int  # bytes of versions that go


class FragmentTable:
    """Who has which bytes of one contiguous buffer, which may grow. Not thread-safe.

    Examples
    --------
    >>> table = FragmentTable(1024)
    >>> table.take(Window(0, 1, 0, GAP, 0), 512, "a")
    0
    >>> table.owners()
    ['a', None]
    """

    def __init__(self, nbytes: int) -> None:
        # Rows: offset, nbytes, ready_ns, urgency, pinned, used. One array, so that one copy shifts
        # all; its rows are contiguous columns, which the window search takes as they are.
        self._rows = np.zeros((_COLUMNS, _ROWS_FIRST), np.int64)
        self._keys: list[Hashable | None] = []
        self._offsets: dict[Hashable, int] = {}
        self._arrivals: dict[Hashable, int] = {}
        self._arrived = 0
        self._uses = 0
        self.nbytes = 0
        self.grow(nbytes)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._offsets

    def grow(self, nbytes: int) -> None:
        """Add bytes at the end of the buffer."""
        if nbytes <= 0:
            return
        if self._keys and self._keys[-1] is None:
            self._rows[1, len(self) - 1] += nbytes
        else:
            self._splice(len(self), len(self), [(None, self.nbytes, nbytes)])
        self.nbytes += nbytes

    def columns(self) -> npt.NDArray[np.int64]:
        """View the table as six columns: offset, nbytes, ready_ns, urgency, pinned, used."""
        return self._rows[:, : len(self)]

    def owners(self) -> list[Hashable | None]:
        """Return the owners in address order; None: a gap."""
        return list(self._keys)

    def keys_in(self, window: Window) -> list[Hashable]:
        """Return the owners that a window would evict."""
        return [key for key in self._keys[window.first : window.last] if key is not None]

    def offset(self, key: Hashable) -> int:
        """Return where the block of an owner begins."""
        return self._offsets[key]

    def arrival(self, key: Hashable | None) -> int:
        """Return the number of the arrival of an owner; 0 for a gap."""
        return 0 if key is None else self._arrivals[key]

    @property
    def largest_gap_bytes(self) -> int:
        """Bytes of the largest gap."""
        gaps = [int(self._rows[1, index]) for index, key in enumerate(self._keys) if key is None]
        return max(gaps, default=0)

    def take(self, window: Window, nbytes: int, key: Hashable) -> int:
        """Give a window to a new owner, evicting who is in it; return the block's offset.

        What is left over becomes a gap, on the side where a gap is its neighbour.
        """
        if key is None or key in self._offsets:
            raise AssertionError(f"{key!r} has a block already")
        first, last = window.first, window.last
        sizes = self._rows[1]
        start, total = int(self._rows[0, first]), int(sizes[first:last].sum())
        left_over = total - align_up(nbytes, ALIGNMENT)
        if left_over < 0:
            # Only the end of a buffer that is no multiple of the alignment is so short.
            left_over = total - nbytes
        if left_over < 0:
            raise AssertionError(f"a window of {total} bytes is too small for {nbytes}")
        for evicted in self.keys_in(window):
            del self._offsets[evicted], self._arrivals[evicted]
        # Gaps have no gap beside them, so a gap before the window means that a version begins it.
        at_end = left_over > 0 and (
            first > 0 and self._keys[first - 1] is None and not self._gap_at(last)
        )
        rows: list[tuple[Hashable | None, int, int]] = [(key, start, total - left_over)]
        if at_end:
            rows = [(None, start, left_over), (key, start + left_over, total - left_over)]
        elif left_over:
            rows.append((None, start + total - left_over, left_over))
        first, last = self._with_gaps(first, last, rows)
        self._splice(first, last, rows)
        self._arrived += 1
        self._arrivals[key] = self._arrived
        return self._offsets[key]

    def free(self, key: Hashable) -> None:
        """Turn the block of an owner into a gap."""
        index = self._index(key)
        del self._offsets[key], self._arrivals[key]
        rows: list[tuple[Hashable | None, int, int]] = [
            (None, int(self._rows[0, index]), int(self._rows[1, index]))
        ]
        first, last = self._with_gaps(index, index + 1, rows)
        self._splice(first, last, rows)

    def set(
        self,
        key: Hashable,
        *,
        ready_ns: int | None = None,
        urgency: int | None = None,
        pinned: bool | None = None,
    ) -> None:
        """Change what policies know of a block."""
        index = self._index(key)
        if ready_ns is not None:
            self._rows[2, index] = ready_ns
        if urgency is not None:
            self._rows[3, index] = urgency
        if pinned is not None:
            self._rows[4, index] = pinned

    def use(self, key: Hashable) -> int:
        """Note a use of a block; return its number, which grows with each use."""
        self._uses += 1
        self._rows[5, self._index(key)] = self._uses
        return self._uses

    def last_use(self, key: Hashable) -> int:
        """Return the number of the last use of a block."""
        return int(self._rows[5, self._index(key)])

    def _index(self, key: Hashable) -> int:
        # The method: the function of numpy takes five times as long.
        return int(self._rows[0, : len(self._keys)].searchsorted(self._offsets[key]))

    def _gap_at(self, index: int) -> bool:
        return index < len(self) and self._keys[index] is None

    def _with_gaps(
        self, first: int, last: int, rows: list[tuple[Hashable | None, int, int]]
    ) -> tuple[int, int]:
        """Merge gaps at the ends of new rows with the gaps beside them."""
        if rows[0][0] is None and first > 0 and self._keys[first - 1] is None:
            first -= 1
            start = int(self._rows[0, first])
            rows[0] = (None, start, rows[0][1] + rows[0][2] - start)
        if rows[-1][0] is None and self._gap_at(last):
            rows[-1] = (None, rows[-1][1], rows[-1][2] + int(self._rows[1, last]))
            last += 1
        return first, last

    def _splice(self, first: int, last: int, rows: list[tuple[Hashable | None, int, int]]) -> None:
        """Replace fragments [first, last)."""
        count = len(self)
        after = count - (last - first) + len(rows)
        if after > self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=1)
        self._rows[:, first + len(rows) : after] = self._rows[:, last:count].copy()
        for index, (key, offset, nbytes) in enumerate(rows, first):
            # A new block is being filled: nobody may take it until `set` says when.
            waits = (0, GAP) if key is None else (NEVER_NS, 0)
            self._rows[:, index] = (offset, nbytes, *waits, 0, 0)
            if key is not None:
                self._offsets[key] = offset
        self._keys[first:last] = [key for key, _, _ in rows]
