"""What an array must hold: numpy, and for reads that may see old or new values, both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Wrong(AssertionError):
    """A call has given bytes that no order of the calls before it explains."""


class Rows:
    """The rows of an array as their stores have left them.

    Calls of one thread, and of threads that wait for each other, are in one order; others are about
    rows of their own. So there is one right value for each row, except where it says `may`.
    """

    def __init__(self, name: str, content: npt.NDArray[Any]) -> None:
        self.name = name
        self.now = content.copy()
        self.loose: list[Read] = []  # reads in flight that may see later stores
        self.log: list[tuple[str, Any, npt.NDArray[Any]]] = []

    def store(self, who: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Rows have these values from now on."""
        self.now[rows] = values
        self.log.append((who, rows, values))
        for read in list(self.loose):  # another thread may settle one meanwhile
            read.may(rows)

    def read(self, rows: npt.NDArray[np.int64]) -> Read:
        """What a read that begins now must see."""
        return Read(self, rows)

    def read_loosely(self, rows: npt.NDArray[np.int64]) -> Read:
        """What a read may see that goes on beside later stores, until it is checked."""
        read = Read(self, rows)
        self.loose.append(read)
        return read

    def whose(self, row: int, value: Bytes) -> str:
        """Name the store that has left a value, the newest first."""
        for who, rows, values in reversed(self.log):
            for at in np.flatnonzero(rows == row):
                if np.array_equal(bytes_of(values[at : at + 1])[0], value):
                    return who
        return "no store of the program, or parts of several"


class Read:
    """The values that a read of some rows may give, byte by byte."""

    def __init__(self, model: Rows, rows: npt.NDArray[np.int64]) -> None:
        self.model, self.rows = model, rows
        self.right = model.now[rows]
        self.others: list[npt.NDArray[Any]] = []

    def may(self, rows: npt.NDArray[np.int64]) -> None:
        """These rows may have the values of now, too."""
        if np.isin(self.rows, rows, assume_unique=False).any():
            self.others.append(self.model.now[self.rows])

    def check(self, got: Any, among: npt.NDArray[np.bool_] | None = None) -> None:
        """Raise Wrong unless a read gave what it may; `among` are the rows that are known."""
        if self.others or self in self.model.loose:
            self.model.loose.remove(self)
        if got.shape != self.right.shape or got.dtype != self.right.dtype:
            raise Wrong(f"{got.dtype}{got.shape} for {self.right.dtype}{self.right.shape}")
        if not got.size:
            return
        seen, right = bytes_of(got), bytes_of(self.right)
        equal = seen == right
        if equal.all():
            return
        for other in self.others:
            equal |= seen == bytes_of(other)
        bad = ~equal.all(axis=1)
        if among is not None:
            bad &= among.reshape(-1)
        if bad.any():
            raise Wrong(self._why(np.flatnonzero(bad), seen, right))

    def _why(self, bad: npt.NDArray[np.int64], seen: Bytes, right: Bytes) -> str:
        name, first = self.model.name, bad[0]
        row = int(self.rows.reshape(-1)[first])
        places = np.flatnonzero(seen[first] != right[first])
        return (
            f"{len(bad)} of {len(seen)} rows of {name} are wrong; row {row} has in bytes "
            f"{places[0]} to {places[-1]} of {seen.shape[1]}\n"
            f"  what was stored by  {self.model.whose(row, seen[first])}\n"
            f"  instead of          {self.model.whose(row, right[first])}"
        )


def bytes_of(rows: npt.NDArray[Any]) -> Bytes:
    """The bytes of each row. Rows are what the first axes count, and elements of one axis."""
    flat = np.ascontiguousarray(rows)
    count = flat.shape[0] if flat.ndim else 1
    return flat.reshape(-1).view(np.uint8).reshape(count, -1)
