"""Checksums of a region's chunks, collected from writes in any order and of any size.

A byte is written once: overlapping writes are refused, and so is the end while bytes are missing.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from flashwarp import _native, endings
from flashwarp.errors import ArgumentError, CheckpointError


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Return how many chunks a region has; the last one may be shorter."""
    return -(-nbytes // chunk_bytes)


def chunk_checksums(
    view: memoryview, chunk_bytes: int, first_bytes: int | None = None
) -> NDArray[np.uint32]:
    """Return the CRC-32C of each chunk of a buffer; its first may be shorter. Releases the GIL."""
    found = _native.crc32c_chunks(view, chunk_bytes, first_bytes or chunk_bytes)
    return np.frombuffer(found, np.uint32)


class Checksums:
    """The checksums of one region while it is written. Thread-safe."""

    def __init__(self, name: str, nbytes: int, chunk_bytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        self._chunk_bytes = chunk_bytes
        self._values = np.zeros(chunk_count(nbytes, chunk_bytes), np.uint32)
        # What was written of a chunk in several writes: its first byte, bytes and checksum.
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        # Disjoint ranges that were begun, ascending; neighbours are joined.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._lock = endings.Lock()

    def reserve(self, offset: int, nbytes: int) -> None:
        """Claim bytes for a write; raises ArgumentError if they are outside or claimed before."""
        end = offset + nbytes
        if offset < 0 or end > self._nbytes:
            raise ArgumentError(
                f"bytes [{offset}, {end}) of region {self._name!r}, which has {self._nbytes}"
            )
        if nbytes == 0:
            return
        with self._lock:
            i = bisect_right(self._begins, offset)
            if (i > 0 and self._ends[i - 1] > offset) or (
                i < len(self._begins) and self._begins[i] < end
            ):
                raise ArgumentError(
                    f"bytes [{offset}, {end}) of region {self._name!r} were written before: each "
                    "byte is written once"
                )
            joins_left = i > 0 and self._ends[i - 1] == offset
            joins_right = i < len(self._begins) and self._begins[i] == end
            if joins_left and joins_right:
                self._ends[i - 1] = self._ends[i]
                del self._begins[i], self._ends[i]
            elif joins_left:
                self._ends[i - 1] = end
            elif joins_right:
                self._begins[i] = offset
            else:
                self._begins.insert(i, offset)
                self._ends.insert(i, end)

    def first_bytes(self, offset: int) -> int:
        """Return how many bytes lie between `offset` and the next chunk."""
        return self._chunk_bytes - offset % self._chunk_bytes

    def put(self, offset: int, nbytes: int, found: NDArray[np.uint32]) -> None:
        """Enter the checksums of a write that was reserved, as `chunk_checksums` returns them."""
        chunk = self._chunk_bytes
        place = offset
        with self._lock:
            for index, value in _ends_of(found):
                begin = offset if index == 0 else (offset // chunk + index) * chunk
                end = min(offset + nbytes, (begin // chunk + 1) * chunk)
                if end - begin != min(chunk, self._nbytes - begin // chunk * chunk):
                    parts = self._parts.setdefault(begin // chunk, [])
                    parts.append((begin, end - begin, value))
            place = offset // chunk
            self._values[place : place + len(found)] = found

    def finish(self) -> NDArray[np.uint32]:
        """Return the checksum of each chunk; raises CheckpointError if bytes were not written."""
        with self._lock:
            wanted = [0] if self._nbytes else []
            if self._begins != wanted or (wanted and self._ends != [self._nbytes]):
                first = self._ends[0] if self._begins[:1] == [0] else 0
                last = self._begins[1] if first and len(self._begins) > 1 else None
                until = last or (self._begins[0] if self._begins and not first else self._nbytes)
                raise CheckpointError(
                    f"bytes [{first}, {until}) of region {self._name!r} were never written: write "
                    "all of it before the commit, or abort the version"
                )
            for index, parts in self._parts.items():
                value = 0
                for _, nbytes, each in sorted(parts):
                    value = _native.crc32c_combine(value, each, nbytes)
                self._values[index] = value
            return self._values


def _ends_of(found: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """The first and the last of some checksums with their numbers: only these may be of parts."""
    last = len(found) - 1
    return [(i, int(found[i])) for i in ([] if last < 0 else [0] if last == 0 else [0, last])]
