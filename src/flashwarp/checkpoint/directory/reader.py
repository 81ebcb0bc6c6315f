"""Reading a version: every byte that is returned has been checked.

The bytes come from a `Source`: a file, or an object of a remote store.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashwarp.checkpoint.directory.buffers import bytes_of, page_aligned
from flashwarp.checkpoint.directory.checksums import chunk_checksums
from flashwarp.checkpoint.directory.manifest import Manifest, StoredRegion
from flashwarp.checkpoint.region import Region, numpy_dtype
from flashwarp.config import integer
from flashwarp.endings import Closing, aside
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DamagedVersionError,
    DtypeError,
    StorageError,
)
from flashwarp.storage.progress import counting

_PIECE_BYTES = 4 << 20
_PIECES_IN_FLIGHT = 4


class Source(Protocol):
    """What holds the bytes of a data file."""

    path: str

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a buffer from byte `offset` on, or raise; thread-safe."""

    def close(self) -> None:
        """Release it; may be called twice."""


class VersionReader(Closing):
    """A version of a checkpoint, open for reading; made by `Directory.open`.

    Attributes
    ----------
    name : str
        The checkpoint.
    version, rank : int
        Which version of it, and the rank that wrote it.
    identity : str
        Of what was written. Copies elsewhere have it too, and a version that is written again under
        this number has another one.
    regions : tuple of Region
        What it holds, in the order of writing.
    metadata : dict
        What the writer stored beside them.

    Notes
    -----
    Thread-safe. Reads block. A reader keeps what it has opened: on a local file system it reads on
    if the version is discarded or replaced; elsewhere such a read raises a `StorageError`.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        run: Callable[..., Future[Any]] | None = None,
    ) -> None:
        self.name = manifest.name
        self.version = manifest.version
        self.rank = manifest.rank
        self.identity = manifest.identity
        self.metadata: Mapping[str, Any] = manifest.metadata
        self.regions = tuple(each.region for each in manifest.regions)
        self.manifest = manifest
        self._stored = {each.region.name: each for each in manifest.regions}
        self._source: Source | None = source
        self._run = run

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self.regions)

    def region(self, name: str) -> Region:
        """Return a region by its name; raises ArgumentError if there is none."""
        return self._find(name).region

    def place(self, region: str | Region) -> int:
        """Return where a region begins in the data file; raises ArgumentError if there is none."""
        return self._find(region).offset

    @property
    def descriptor(self) -> int:
        """The open data file; -1 if the bytes come from elsewhere."""
        return getattr(self._source, "descriptor", -1)

    @property
    def o_direct(self) -> bool | None:
        """Whether to read past the page cache (True), or through it (False), if one was asked."""
        return getattr(self._source, "o_direct", None)

    def read_into(self, region: str | Region, offset: int, buffer: Any) -> None:
        """Fill a buffer with bytes of a region, from byte `offset` on, and check them.

        Parameters
        ----------
        region : str or Region
            Which region, or its name.
        offset : int
            First byte in it. Reads that begin and end at multiples of the chunk are the fastest:
            of others, the chunks at their ends are read whole.
        buffer : writable contiguous buffer
            Gets the bytes. If the call raises, its contents are undefined.

        Raises
        ------
        DamagedVersionError
            If a chunk that the read touches is not what was written.
        StorageError, RemoteError
            If the transfer failed.
        ArgumentError, BoundsError, ClosedError
        """
        stored = self._find(region)
        view = bytes_of(buffer, writable=True)
        nbytes = stored.region.nbytes
        offset = integer("offset", offset)
        if offset < 0 or offset + view.nbytes > nbytes:
            raise BoundsError(
                f"bytes [{offset}, {offset}+{view.nbytes}) of region {stored.region.name!r}, "
                f"which has {nbytes}"
            )
        chunk = self.manifest.chunk_bytes
        end = offset + view.nbytes
        whole_begin = -(-offset // chunk) * chunk
        whole_end = end if end == nbytes else end // chunk * chunk
        if whole_begin > whole_end:  # inside of one chunk
            whole_begin = whole_end = end
        self._read_part(stored, offset, view[: whole_begin - offset])
        self._read_chunks(stored, whole_begin, view[whole_begin - offset : whole_end - offset])
        self._read_part(stored, whole_end, view[whole_end - offset :])

    def load(self, region: str | Region) -> NDArray[Any]:
        """Return a region as a new array; raises DtypeError if numpy does not have its dtype."""
        found = self._find(region).region
        dtype = numpy_dtype(found.dtype)
        if dtype is None:
            raise DtypeError(
                f"numpy has no dtype {found.dtype!r}: read region {found.name!r} by read_into"
            )
        result = page_aligned(found.nbytes)
        self.read_into(found.name, 0, result)
        return result.view(dtype).reshape(found.shape)

    def verify(self) -> None:
        """Read all bytes, and raise `DamagedVersionError` if any is not what was written."""
        # Both are powers of two, so this is a number of whole chunks.
        scratch = page_aligned(
            max(_PIECES_IN_FLIGHT * _PIECE_BYTES, self.manifest.chunk_bytes)
        ).data
        end, count = 0, counting(f"reading {self.name} {self.version}", self.nbytes)
        for stored in self.manifest.regions:
            self._check_padding(end, stored.offset)
            for offset in range(0, stored.region.nbytes, len(scratch)):
                view = scratch[: min(len(scratch), stored.region.nbytes - offset)]
                self._read_chunks(stored, offset, view)
                count(len(view))
            end = stored.offset + stored.region.nbytes
        self._check_padding(end, self.manifest.data_bytes)

    def close(self) -> None:
        """Release the file. May be called twice, and while other threads read."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _find(self, region: str | Region) -> StoredRegion:
        name = region.name if isinstance(region, Region) else region
        found = self._stored.get(name) if isinstance(name, str) else None
        if found is None:
            some = ", ".join(map(repr, list(self._stored)[:5]))
            raise ArgumentError(
                f"version {self.version} of {self.name!r} has no region {str(name)[:200]!r}; it "
                f"has {len(self._stored)}: {some}"
            )
        return found

    def _read_part(self, stored: StoredRegion, offset: int, view: memoryview) -> None:
        """Read bytes inside of one chunk."""
        if not view.nbytes:
            return
        chunk = self.manifest.chunk_bytes
        begin = offset // chunk * chunk
        scratch = page_aligned(min(chunk, stored.region.nbytes - begin)).data
        self._read_chunks(stored, begin, scratch)
        view[:] = scratch[offset - begin : offset - begin + view.nbytes]

    def _read_chunks(self, stored: StoredRegion, offset: int, view: memoryview) -> None:
        """Read whole chunks and check them; several pieces at a time if there are many."""
        step = max(self.manifest.chunk_bytes, _PIECE_BYTES)
        if self._run is None or view.nbytes <= step:
            for begin in range(0, view.nbytes, step):
                self._read_piece(stored, offset + begin, view[begin : begin + step])
            return
        stopped: list[bool] = []
        read = partial(self._read_pieces, stored, offset, view, step, stopped)
        aside(read, partial(stopped.append, True))

    def _read_pieces(
        self, stored: StoredRegion, offset: int, view: memoryview, step: int, stopped: list[bool]
    ) -> None:
        assert self._run is not None
        pending: list[Future[None]] = []
        try:
            for begin in range(0, view.nbytes, step):
                if stopped:
                    break
                if len(pending) == _PIECES_IN_FLIGHT:
                    pending.pop(0).result()
                piece = view[begin : begin + step]
                pending.append(self._run(self._read_piece, stored, offset + begin, piece))
        finally:
            # Also after an error: nobody may write the caller's buffer when the call has ended.
            failures = [failure for each in pending if (failure := each.exception()) is not None]
        if failures:
            raise failures[0]

    def _read_piece(self, stored: StoredRegion, offset: int, piece: memoryview) -> None:
        self._fill(stored.offset + offset, piece)
        chunk = self.manifest.chunk_bytes
        self.check(stored.region, offset // chunk, chunk_checksums(piece, chunk))

    def check(self, region: str | Region, first: int, found: NDArray[np.uint32]) -> None:
        """Compare checksums of a region's chunks, from number `first` on, with those written.

        Raises DamagedVersionError if one is another.
        """
        stored, chunk = self._find(region), self.manifest.chunk_bytes
        wrong = np.flatnonzero(found != stored.checksums[first : first + len(found)])
        if len(wrong):
            begin = (first + int(wrong[0])) * chunk
            end = min(begin + chunk, stored.region.nbytes)
            raise DamagedVersionError(
                self.path,
                f"bytes [{begin}, {end}) of region {stored.region.name!r} (at byte "
                f"{stored.offset + begin} of the file) do not have the checksum that was written",
            )

    def _check_padding(self, begin: int, end: int) -> None:
        scratch = page_aligned(end - begin).data
        if end > begin:
            self._fill(begin, scratch)
            if any(scratch):
                raise DamagedVersionError(
                    self.path, f"bytes [{begin}, {end}) between regions are not zeros"
                )

    @property
    def path(self) -> str:
        """The data file, or what a remote store calls it."""
        return self.manifest.data if self._source is None else self._source.path

    def _fill(self, offset: int, view: memoryview) -> None:
        source = self._source
        if source is None:
            raise ClosedError(f"the reader of version {self.version} of {self.name!r} is closed")
        try:
            source.read_into(offset, view)
        except StorageError as error:
            if error.errno != errno.ENODATA:
                raise
            raise DamagedVersionError(source.path, f"it was cut short: {error}") from error
