"""The way of rows that a GPU reads in place: warps for small rows, copy engines for long pieces.

A copy engine moves long pieces at the speed of the link and needs no multiprocessor, but somebody
on the host must know the rows. So sequences, and rows of 64 KiB whose ids are on the host, go by
batched copies. Warps pull what is left: `PullWay`.
"""

# The methods are documented once, by `Way`.
# ruff: noqa: D102
from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy as np

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.array.copying import Numbers, RowCopies
from flashwarp.array.operands import Index
from flashwarp.device import OwnedStream
from flashwarp.explanation import Explanation
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.explanation import explained
from flashwarp.pipeline.ids import host_rows, on_gpu
from flashwarp.pipeline.ticket import Ticket
from flashwarp.pipeline.ways import PullWay

__all__ = ["CopyWay"]

Pieces: TypeAlias = tuple[Numbers, Numbers, Numbers]
"""Targets, sources and bytes."""

# A batched copy of pieces of 64 KiB fills the link; one of 16 KiB reaches half of it.
_PIECE_BYTES_MIN = 64 << 10


class CopyWay(PullWay):
    """Copies of long pieces on streams of their own, one for each direction; warps for the rest."""

    def __init__(self, array: Array, sms: int | None, timeout_s: float) -> None:
        super().__init__(array, sms, timeout_s)
        self._out: OwnedStream = self._device.create_stream()
        storage, row_bytes = array._attachment.storage, array._format.row_bytes
        self._copies = RowCopies(self._device, storage, row_bytes)

    def place(self, ids: object) -> tuple[range | Index, str]:
        long_rows = self.array._format.row_bytes >= _PIECE_BYTES_MIN
        if isinstance(ids, range | slice) or (long_rows and not on_gpu(ids)):
            return host_rows(self.array, ids)
        return super().place(ids)

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        # Writes by copies may still take rows from the buffer.
        self._device.order(self._out.handle, self._side.handle)
        if not _by_copies(chosen):
            super().read(chosen, buffer, stream, ticket)
            return
        rows, places, nbytes = self._pieces(chosen)
        self._copy(chosen, (buffer.address + places, rows, nbytes), self._side, stream, ticket)

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        if not _by_copies(chosen):
            super().write(chosen, rows, stream, ticket)
            return
        source = self.array._attachment.operands.source(rows, chosen)
        ticket.operands = (ticket.operands, source)
        places, at, nbytes = self._pieces(chosen)
        pieces = places, source.address + at, nbytes
        self._copy(chosen, pieces, self._out, stream, ticket)

    def _copy(
        self,
        chosen: range | Index,
        pieces: Pieces,
        own: OwnedStream,
        stream: int,
        ticket: Ticket,
    ) -> None:
        """Queue copies on a stream of ours, after the caller's work so far."""
        self._refuse_capture(
            stream,
            "the host chooses the pieces that copy engines move (give the ids as an array on the "
            "GPU, and warps pull the rows)",
        )
        self._device.order(stream, own.handle)
        ticket.route = "copies"
        queue = partial(self._queue_copies, pieces, own)
        launcher = self.array._attachment.launcher
        launcher.ordered(own is self._out, own.handle, chosen, queue)
        self._end(ticket, own)

    def _queue_copies(self, pieces: Pieces, own: OwnedStream) -> None:
        """Write dirty lines back, and copy; after copies to the storage no line is left."""
        if self.array.writable:
            _maintain(self.array, ("flush_lines",), own)
        self._copies.queue(*pieces, own.handle)
        if own is self._out:
            _maintain(self.array, ("invalidate_lines", "drop_tier"), own)

    def _pieces(self, chosen: range | Index) -> tuple[Numbers, Numbers, Numbers]:
        return self._copies.pieces(
            chosen if isinstance(chosen, range) else np.asarray(chosen.owner)
        )

    def explain(self) -> Explanation:
        pulled = super().explain()
        return explained(
            pulled.route,
            f"{pulled.reason}; copy engines move sequences, and rows of "
            f"{_PIECE_BYTES_MIN >> 10} KiB and more whose ids are on the host",
            pulled.facts["multiprocessors"],
            0,
            pulled.facts["array"],
        )

    def close(self) -> None:
        self._close([self._side, self._out])


def _by_copies(chosen: range | Index) -> bool:
    """Return whether the host knows the rows; a list that was copied to the GPU is for warps."""
    return isinstance(chosen, range) or (chosen.checked and chosen.held is None)


def _maintain(array: Array, kernels: tuple[str, ...], stream: OwnedStream) -> None:
    """Queue kernels over the array's lines on a stream of ours."""
    endings.holding((array.cache.turn,), partial(_maintain_in_turn, array, kernels, stream.handle))


def _maintain_in_turn(array: Array, kernels: tuple[str, ...], stream: int) -> None:
    attachment = array._attachment
    attachment.join(stream)
    array.device.order(None, stream)
    for name in kernels:
        if name != "drop_tier":
            attachment.launcher.maintain(name, stream=stream)
        elif attachment.launcher.volume.in_host_tier:
            attachment.launcher.drop_tier(stream=stream)
