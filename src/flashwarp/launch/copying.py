"""Copies of rows between a storage that a GPU reads in place and device memory, by copy engines.

A copy engine moves long pieces at the speed of the link and takes no multiprocessor, but it knows
nothing of the cache: who queues copies writes dirty lines back first, in the order of the stream.
Pipelines move batches by `RowCopies`; `RangeCopies` chooses which reads of an array do.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import _native, endings
from flashwarp._jit.cuda_context import End
from flashwarp.cache.volume import Volume
from flashwarp.device import CudaDevice
from flashwarp.nvme import Service
from flashwarp.nvme.software import SoftwareService
from flashwarp.storage import File, Memory, Namespace
from flashwarp.storage.routes import PIECE_BYTES

Numbers: TypeAlias = npt.NDArray[np.int64]

# Shorter ranges take their time from the launch, not from the link.
_BYTES_MIN = 1 << 20

# How often a range must exceed the cache. At least half of it cannot be there then, and what a
# gather would leave there is evicted before the range is read again.
_TIMES_THE_CACHE = 2


def why_no_copies(service: Service, storage: Namespace, *, waits: bool = False) -> str:
    """Say why copy engines cannot read a storage; empty if they can.

    If the caller `waits` for a copy of a leased file, it can ask again afterwards.
    """
    if service.route != "in_place" or not isinstance(service, SoftwareService):
        return "the rows are not in memory that the GPU reads"
    if not isinstance(storage, Memory | File):
        return "the rows lie in several storages"
    if service.leased and not (waits and _lease_is_held(storage)):
        # Warps look at the lease's epoch. A copy that is under way would not notice a writer.
        return "a lease guards the file, which another process may open for writing"
    if service.model is not None:
        return "a drive is modelled"
    return ""


def _lease_is_held(storage: Namespace) -> bool:
    return isinstance(storage, File) and storage.lease is not None and storage.lease.held


class RowCopies:
    """Copies of rows of one storage, for which `why_no_copies` has no reason."""

    def __init__(self, device: CudaDevice, storage: Namespace, row_bytes: int) -> None:
        assert isinstance(storage, Memory | File)
        self._context = device.context
        self._base = int(storage.native.mapped_base)
        self._row_bytes = row_bytes
        # A file's pages may be registered in pieces, and no copy may cross from one into the next.
        mapping = storage.mapping if isinstance(storage, File) else None
        self._cut_from = None if mapping is None else mapping.address

    def pieces(self, rows: range | Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the address of each piece in the storage, its place in the batch, and its bytes.

        By arrays: a loop in Python would take longer than the copies.
        """
        row_bytes = self._row_bytes
        if isinstance(rows, range):
            firsts, places, counts = (
                np.array([one], np.int64) for one in (rows.start, 0, len(rows))
            )
        else:
            firsts, places, counts = _runs(rows)
        begins, nbytes = self._base + firsts * row_bytes, counts * row_bytes
        # How far into a piece each run begins.
        ahead = np.zeros_like(begins)
        if self._cut_from is not None:
            ahead = (begins - self._cut_from) % PIECE_BYTES
        pieces = np.where(nbytes > 0, (ahead + nbytes + PIECE_BYTES - 1) // PIECE_BYTES, 0)
        run = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        first = np.maximum(number * PIECE_BYTES - ahead[run], 0)
        last = np.minimum((number + 1) * PIECE_BYTES - ahead[run], nbytes[run])
        return begins[run] + first, places[run] * row_bytes + first, last - first

    def queue(
        self,
        targets: Numbers,
        sources: Numbers,
        nbytes: Numbers,
        stream: int,
        end: End | None = None,
    ) -> None:
        """Queue copies on a stream, which is not being captured."""
        pieces = list(zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True))
        if pieces:
            self._context.copy_and_append((), 0, pieces, 0, end, stream)


class RangeCopies:
    """Which reads of an array's ranges go by copy engines, and their copies.

    Parameters
    ----------
    volume : Volume
    service : Service
    storage : Namespace
    row_bytes : int
    writable : bool
        Whether lines may be dirty.

    Attributes
    ----------
    writable : bool
    moved : Moved
        Counts the copied ranges, and their rows.
    """

    def __init__(
        self,
        volume: Volume,
        service: Service,
        storage: Namespace,
        row_bytes: int,
        *,
        writable: bool,
    ) -> None:
        self.writable = writable
        self._volume, self._service, self._storage = volume, service, storage
        self._row_bytes = row_bytes
        cache = volume.cache
        held = cache.capacity + (cache.host_memory if volume.in_host_tier else 0)
        self._bytes_min = max(_BYTES_MIN, _TIMES_THE_CACHE * held)
        self.moved = _native.Moved()
        self._unsure = False

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return self.moved.rows * self._row_bytes

    def takes(self, rows: range, stream: int | None) -> bool:
        """Return whether a range goes by copy engines. A graph's replays leave it to warps.

        Calls on the library's own stream (None) wait for their copies, and then ask `spoilt`.
        """
        if len(rows) * self._row_bytes < self._bytes_min:
            return False
        # A file may leave its in-place route at any time.
        if why_no_copies(self._service, self._storage, waits=stream is None):
            return False
        return stream is None or self._volume.device.capture(stream) is None

    def read(self, rows: range, buffer: int, stream: int | None, end: End | None) -> None:
        """Queue the copies of a range, whose dirty lines were written back, to a buffer."""
        device = self._volume.device
        assert isinstance(device, CudaDevice)
        copies = RowCopies(device, self._storage, self._row_bytes)
        sources, places, nbytes = copies.pieces(rows)
        targets = buffer + places
        handle = device.own_stream() if stream is None else stream

        def queue() -> None:
            # One call each: the driver takes no batches on the legacy default stream, and the end
            # of a piece that it refuses is not marked.
            for k in range(len(sources)):
                one, last = slice(k, k + 1), k + 1 == len(sources)
                copies.queue(targets[one], sources[one], nbytes[one], handle, end if last else None)

        if len(sources) == 1:
            queue()
        else:
            endings.uninterrupted(queue)
        self.moved.add(len(rows))
        self._unsure = self._unsure or stream is None

    def spoilt(self) -> bool:
        """Return whether a writer may have had the file while copies ran, which have ended.

        In the array's turn, after a wait for the library's own stream.
        """
        unsure, self._unsure = self._unsure, False
        return unsure and bool(why_no_copies(self._service, self._storage, waits=True))

    def note(self) -> str:
        """Say for people which ranges go by copy engines, and how much did."""
        why = why_no_copies(self._service, self._storage, waits=True)
        moved = f"{self.moved.calls} ranges of {self.nbytes} bytes in all so far"
        if why:
            return f"by warps, because {why}" + (f"; {moved} by copy engines" * bool(self.nbytes))
        return (
            f"by copy engines from {self._bytes_min} bytes on, past the cache, which keeps too "
            f"little of them: {moved}; shorter ones, and those in CUDA graphs"
            f"{', of async calls and on streams' if self._service.leased else ''}, by warps"
        )


def _runs(ids: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Merge neighbours: the first row of each run, its place in the batch, and how many rows."""
    if not ids.size:
        return ids, ids, ids
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    return ids[begins], begins, np.diff(begins, append=ids.size)
