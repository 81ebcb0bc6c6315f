"""The way of rows that a GPU reads in place: warps for small rows, copy engines for long pieces.

A copy engine moves long pieces at the speed of the link and needs no multiprocessor, but somebody
on the host must know the rows. So sequences, and rows of 64 KiB whose ids are on the host, go by
batched copies. Warps pull what is left: `PullWay`.
"""

# The methods are documented once, by `Way`.
# ruff: noqa: D102
from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.array.copying import Numbers, RowCopies
from flashwarp.array.operands import Index
from flashwarp.device import Event, OwnedStream
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.explanation import PipelineExplanation
from flashwarp.pipeline.ids import host_rows, on_gpu
from flashwarp.pipeline.ticket import Ticket
from flashwarp.pipeline.ways import PullWay

__all__ = ["CopyWay"]

# A batched copy of pieces of 64 KiB fills the link; one of 16 KiB reaches half of it.
_PIECE_BYTES_MIN = 64 << 10
# Batches whose rows are known apart; later ones count as one.
_MOVING_MAX = 64


class CopyWay(PullWay):
    """Copies of long pieces on streams of their own, one for each direction; warps for the rest."""

    def __init__(self, array: Array, sms: int | None, timeout_s: float) -> None:
        super().__init__(array, sms, timeout_s)
        self._out: OwnedStream = self._device.create_stream()
        storage, row_bytes = array._attachment.storage, array._format.row_bytes
        self._copies = RowCopies(self._device, storage, row_bytes)
        # Whether later batches must come after what was written by copies.
        self._copied = False
        # What batches on the other stream may still move, oldest first: the lowest and the highest
        # row, and the event behind them. Writes by copies come after those that have their rows.
        self._moving: deque[tuple[int, int, Event]] = deque()

    def place(self, ids: object) -> tuple[range | Index, str]:
        long_rows = self.array._format.row_bytes >= _PIECE_BYTES_MIN
        if isinstance(ids, range | slice) or (long_rows and not on_gpu(ids)):
            return host_rows(self.array, ids)
        return super().place(ids)

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        self._after_copies()
        if not _by_copies(chosen):
            super().read(chosen, buffer, stream, ticket)
            self._note(chosen, ticket)
            return
        self._begin(stream, self._side)
        rows, places, nbytes = self._pieces(chosen)
        self._copy(buffer.address + places, rows, nbytes, self._side, ticket)
        self._end(ticket, self._side)
        self._note(chosen, ticket)

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        if not _by_copies(chosen):
            self._after_copies()
            super().write(chosen, rows, stream, ticket)
            self._note(chosen, ticket)
            return
        source = self.array._attachment.operands.source(rows, chosen)
        ticket.operands = (ticket.operands, source)
        self._begin(stream, self._out)
        self._after_moves(chosen)
        places, at, nbytes = self._pieces(chosen)
        self._copy(places, source.address + at, nbytes, self._out, ticket)
        _maintain(self.array, ("invalidate_lines", "drop_tier"), self._out)
        self._end(ticket, self._out)
        self._copied = True

    def _after_copies(self) -> None:
        """Let later batches come after what was written by copies."""
        if self._copied:
            self._device.order(self._out.handle, self._side.handle)
            self._copied = False

    def _note(self, chosen: range | Index, ticket: Ticket) -> None:
        """Note which rows our first stream moves now."""
        if not self.array.writable or not len(chosen) or ticket.capture is not None:
            return
        while self._moving and self._moving[0][2].done():
            self._free.append(self._moving.popleft()[2])
        low, high = self._span(chosen)
        if len(self._moving) == _MOVING_MAX:
            last_low, last_high, last = self._moving.pop()
            low, high = min(low, last_low), max(high, last_high)
            self._free.append(last)  # it ends before this one, which stands for both
        event = self._take_event()
        event.record(self._side)
        self._moving.append((low, high, event))

    def _span(self, chosen: range | Index) -> tuple[int, int]:
        """Return the lowest and the highest row that may be among the chosen ones."""
        if not _by_copies(chosen):
            return 0, len(self.array) - 1
        if isinstance(chosen, range):
            return chosen[0], chosen[-1]
        rows = np.asarray(chosen.owner)
        return int(rows.min()), int(rows.max())

    def _after_moves(self, chosen: range | Index) -> None:
        """Let a write by copies come after what our first stream moves of its rows."""
        if len(chosen):
            low, high = self._span(chosen)
            for first, last, event in reversed(self._moving):
                if first <= high and low <= last:
                    event.wait_on(self._out)  # and so for all before it
                    return

    def _begin(self, stream: int, own: OwnedStream) -> None:
        """Let copies come after the caller's work so far, and after the write-back of lines."""
        self._refuse_capture(
            stream,
            "the host chooses the pieces that copy engines move (give the ids as an array on the "
            "GPU, and warps pull the rows)",
        )
        self._device.order(stream, own.handle)
        if self.array.writable:
            _maintain(self.array, ("flush_lines",), own)

    def _copy(
        self, targets: Numbers, sources: Numbers, nbytes: Numbers, own: OwnedStream, ticket: Ticket
    ) -> None:
        ticket.way = "copies"
        self._copies.queue(targets, sources, nbytes, own.handle)

    def _pieces(self, chosen: range | Index) -> tuple[Numbers, Numbers, Numbers]:
        return self._copies.pieces(
            chosen if isinstance(chosen, range) else np.asarray(chosen.owner)
        )

    def explain(self) -> PipelineExplanation:
        pulled = super().explain()
        return PipelineExplanation(
            pulled.way,
            f"{pulled.reason}; copy engines move sequences, and rows of "
            f"{_PIECE_BYTES_MIN >> 10} KiB and more whose ids are on the host",
            pulled.multiprocessors,
            0,
            pulled.array,
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
