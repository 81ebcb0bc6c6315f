"""`Gatherer`: host threads that collect scattered pieces into one buffer."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp import _native, endings
from flashwarp._names import renamed
from flashwarp.config import cores, integer
from flashwarp.errors import ArgumentError, BoundsError, StorageError

_THREADS_MAX = 256
_IN_FLIGHT_MAX = 4096
_MOST = 1 << 62

Bytes = npt.NDArray[Any]


@renamed
class Gatherer(endings.OfProcess):
    """Collects scattered pieces of one size at memory speed, by a few threads of the host.

    Piece i of the buffer is the one that the i-th offset names, so they lie in the order in
    which its user asked for it. Calls block, release the GIL, and may come from any number of
    threads; the caller's thread takes part in its own work.

    Parameters
    ----------
    threads : int, optional
        The most that work on one call, the caller among them. Default: every core that this process
        may use.
    in_flight : int
        Reads of a file that one of them has in flight, at most.

    Examples
    --------
    >>> import numpy as np
    >>> from flashwarp.transfer import Gatherer
    >>> data = np.arange(40, dtype=np.uint8)
    >>> rows = np.empty(12, np.uint8)
    >>> with Gatherer(threads=2) as gatherer:
    ...     gatherer.gather(rows, data, offsets=[20, 0, 36], piece_bytes=4)
    >>> rows.tolist()
    [20, 21, 22, 23, 0, 1, 2, 3, 36, 37, 38, 39]
    """

    _kind = "gatherer"

    def __init__(self, threads: int | None = None, in_flight: int = 64) -> None:
        super().__init__()
        count = cores() if threads is None else threads
        self._native = _native.Gatherer(
            integer("threads", count, 1, _THREADS_MAX),
            integer("in_flight", in_flight, 1, _IN_FLIGHT_MAX),
        )

    @property
    def threads(self) -> int:
        """The most threads that work on one call."""
        return self._native.threads

    @property
    def file_engine(self) -> str:
        """How files are read: "io_uring", or what takes its place and why."""
        self._check_usable()
        return self._native.file_engine

    def gather(
        self,
        buffer: Bytes,
        source: Bytes,
        offsets: npt.ArrayLike,
        piece_bytes: int,
        checksums: Bytes | None = None,
    ) -> None:
        """Collect pieces of memory, or of a mapped file, into `buffer`.

        Parameters
        ----------
        buffer : array
            Contiguous and writable; its first ``len(offsets) * piece_bytes`` bytes are written.
        source : array
            Contiguous: memory, or a mapping such as `numpy.memmap`.
        offsets : array_like of int64
            Byte at which each piece begins in `source`. One may occur more than once.
        piece_bytes : int
            Bytes of each piece.
        checksums : array of uint32, optional
            Gets the CRC-32C of each piece, which costs little while a piece is in the cache of the
            core that has copied it.

        Raises
        ------
        BoundsError
            A piece lies outside of `source`, or the buffer or `checksums` is too small. Nothing was
            copied.
        StorageError
            A page of the mapped file is gone. The buffer's content is undefined.
        """
        to, where = self._buffer(buffer, offsets, piece_bytes)
        _check_array("source", source, writable=False)
        last = source.nbytes - piece_bytes
        if where.size and (where.min() < 0 or where.max() > last):
            wrong = int(np.flatnonzero((where < 0) | (where > last))[0])
            raise BoundsError(
                f"piece {wrong} begins at byte {int(where[wrong])}, and the memory has "
                f"{source.nbytes} bytes: offsets are between 0 and {last}"
            )
        base, sums = source.ctypes.data, 0
        if checksums is not None:
            _check_array("array of checksums", checksums, writable=True)
            if checksums.dtype != np.uint32 or checksums.size < where.size:
                raise BoundsError(
                    f"{checksums.size} checksums of {checksums.dtype} for {where.size} pieces: "
                    "give an array of uint32 with one for each"
                )
            sums = checksums.ctypes.data
        self._check(self._native.gather(to, base, *_list(where), piece_bytes, sums), where, None)

    def read(self, buffer: Bytes, fd: int, offsets: npt.ArrayLike, piece_bytes: int) -> None:
        """Collect pieces of an open file into `buffer`, with many reads in flight.

        Neighbours in the file that are neighbours in the buffer become one read. With O_DIRECT, the
        caller aligns offsets, sizes and the buffer.

        Raises
        ------
        StorageError
            A read failed, or the file ends before a piece does; it names the first such piece.
        """
        to, where = self._buffer(buffer, offsets, piece_bytes)
        self._check(self._native.read(to, _descriptor(fd), *_list(where), piece_bytes), where, fd)

    # Checks.

    def _buffer(
        self, buffer: Bytes, offsets: npt.ArrayLike, piece_bytes: int
    ) -> tuple[int, npt.NDArray[np.int64]]:
        self._check_usable()
        integer("piece_bytes", piece_bytes, 1, _MOST)
        _check_array("buffer", buffer, writable=True)
        where = np.asarray(offsets)
        if where.ndim != 1 or (where.size and where.dtype.kind not in "iu"):
            raise ArgumentError(
                f"offsets of shape {where.shape} and dtype {where.dtype}: give a list of integers"
            )
        if where.size and int(where.max()) > _MOST:
            raise BoundsError(f"offset {int(where.max())} is beyond any file")
        where = np.ascontiguousarray(where, np.int64)
        if where.size * piece_bytes > buffer.nbytes:
            raise BoundsError(
                f"{where.size} pieces of {piece_bytes} bytes do not fit into a buffer of "
                f"{buffer.nbytes} bytes"
            )
        if where.size and int(where.min()) < 0:
            raise BoundsError(f"offset {int(where.min())} is negative")
        return buffer.ctypes.data, where

    def _check(
        self, outcome: tuple[int, int], where: npt.NDArray[np.int64], fd: int | None
    ) -> None:
        code, piece = outcome
        if code == 0:
            return
        offset = int(where[piece])
        if code == errno.EFAULT and fd is None:
            text = "a page of the mapped file is gone: it became shorter, or its storage failed"
        elif code == errno.ENODATA:
            text = "the file ends before the piece does"
        else:
            text = os.strerror(code)
        name = None if fd is None else f"descriptor {fd}"
        raise StorageError(code, f"piece {piece} at byte {offset}: {text}", name, offset=offset)

    def close(self) -> None:
        """End the threads, after calls that run. May be called twice."""
        self._closed = True
        self._native.stop()

    def __repr__(self) -> str:
        return "<Gatherer, closed>" if self._closed else f"<Gatherer of {self.threads} threads>"


def _check_array(what: str, array: Bytes, *, writable: bool) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"the {what} is a {type(array).__name__}, not a numpy array")
    if not array.flags.c_contiguous:
        raise ArgumentError(f"the {what} is not contiguous: copy it first")
    if writable and not array.flags.writeable:
        raise ArgumentError(f"the {what} is read-only")


def _list(where: npt.NDArray[np.int64]) -> tuple[int, int]:
    return where.ctypes.data, where.size


def _descriptor(fd: int) -> int:
    return integer("fd", fd, 0, (1 << 31) - 1)
