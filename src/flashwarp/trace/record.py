"""Where traces come from: files of row indices, and arrays in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flashwarp.array.array import Array
from flashwarp.cache.sizes import LINE_BYTES_MAX, LINE_BYTES_MIN
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError
from flashwarp.trace.format import Trace


def ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return so many integers from each start on, one range after the other."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(np.repeat(starts, counts) + within, np.int64)


def lines_of_rows(
    starts: npt.NDArray[np.int64], nbytes: int, line_bytes: int
) -> npt.NDArray[np.int64]:
    """List the lines that pieces of `nbytes` bytes touch, from these offsets on, in order."""
    if nbytes == 0:
        return np.empty(0, np.int64)
    first = starts // line_bytes
    return ranges(first, (starts + nbytes - 1) // line_bytes - first + 1)


def trace_of_indices(
    indices: npt.ArrayLike, row_bytes: int, *, line_bytes: int = 4096, name: str = "indices"
) -> Trace:
    """Make the trace of a gather: the lines that these rows touch, one after the other.

    Parameters
    ----------
    indices : array of int
        Rows, none negative.
    row_bytes : int
        Bytes of a row; rows lie back to back.
    line_bytes : int
        A power of two.
    name : str
        For people.

    Examples
    --------
    >>> from flashwarp.trace import trace_of_indices
    >>> trace_of_indices([0, 3], 2048, line_bytes=1024).lines.tolist()
    [0, 1, 6, 7]
    """
    rows = np.asarray(indices)
    if not np.issubdtype(rows.dtype, np.integer):
        raise ArgumentError(f"indices have dtype {rows.dtype}, and must be integers")
    if rows.size and rows.min() < 0:
        raise ArgumentError(f"index {rows.min()} is negative, and the trace has no end to count")
    row_bytes, line_bytes = integer("row_bytes", row_bytes), integer("line_bytes", line_bytes)
    if row_bytes < 1:
        raise ArgumentError(f"rows of {row_bytes} bytes touch no line")
    if not LINE_BYTES_MIN <= line_bytes <= LINE_BYTES_MAX or line_bytes & (line_bytes - 1):
        raise ArgumentError(
            f"line_bytes={line_bytes} is no power of two from {LINE_BYTES_MIN} to {LINE_BYTES_MAX}"
        )
    if rows.size and (int(rows.max()) + 1) * row_bytes > SIZE_MAX:
        raise ArgumentError(
            f"index {rows.max()} with rows of {row_bytes} bytes lies beyond byte {SIZE_MAX}"
        )
    starts = rows.reshape(-1).astype(np.int64) * row_bytes
    return Trace(lines_of_rows(starts, row_bytes, line_bytes), line_bytes, name)


class Recorder:
    """The accesses of one array while `record` is open."""

    def __init__(self, array: Array) -> None:
        self._line_bytes = array.cache.line_bytes
        self._name = repr(array)
        self._parts: list[npt.NDArray[np.int64]] = []

    def see(self, starts: npt.NDArray[np.int64], nbytes: int) -> None:
        """Note pieces of `nbytes` bytes at these byte offsets of the array."""
        self._parts.append(lines_of_rows(starts, nbytes, self._line_bytes))

    def trace(self) -> Trace:
        """Return what was seen so far."""
        lines = np.concatenate(self._parts) if self._parts else np.empty(0, np.int64)
        return Trace(lines, self._line_bytes, self._name)


@contextlib.contextmanager
def record(array: Array) -> Iterator[Recorder]:
    """Record which lines the calls of an array touch, in the order of the calls.

    It sees gathers, scatters and indexing, whether or not their lines are in the cache. It does not
    see prefetches, because their lines are used later, nor your own kernels, because only the
    device sees their accesses. Each call copies indices on a GPU to the host.

    Parameters
    ----------
    array : Array

    Yields
    ------
    Recorder
        Its `trace()` gives what was seen.

    Examples
    --------
    >>> import flashwarp as fw, flashwarp.trace
    >>> with fw.create("rows.npy", "float32", (1000, 1024), device="cpu") as x:
    ...     with fw.trace.record(x) as seen:
    ...         _ = x[[5, 7, 5]]
    ...     seen.trace().lines.tolist()
    [5, 7, 5]
    """
    recorder = Recorder(array)
    with array._turns.watched(recorder.see):
        yield recorder
