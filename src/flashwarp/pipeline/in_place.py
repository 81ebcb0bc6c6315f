"""The route *in place*: a GPU moves the rows itself, by warps or by its copy engines.

A few warps pull rows on a stream of the pipeline's own. A copy engine moves long pieces at the
speed of the link and needs no multiprocessor, but somebody on the host must know the rows. So if
copy engines reach the storage, sequences, and rows of 64 KiB whose ids are on the host, go by
batched copies. Rows that the GPU does not read in place are pulled by commands.
"""

# The methods are documented once, by `Route`.
# ruff: noqa: D102
from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.explanation import Explanation
from flashwarp.launch.copying import Numbers, RowCopies, why_no_copies
from flashwarp.launch.operands import Index, Rows
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.ids import host_rows, on_gpu
from flashwarp.pipeline.route import GpuRoute
from flashwarp.pipeline.ticket import Ticket
from flashwarp.transfer import DeviceQueue

# Multiprocessors whose loads fill PCIe 5: what one can have on its way is a quarter of the link.
_SMS = 4
# Those whose warps wait for commands.
_WAITING_SMS = 8

# A batched copy of pieces of 64 KiB fills the link; one of 16 KiB reaches half of it.
_PIECE_BYTES_MIN = 64 << 10

_NO_CAPTURE = (
    "the host chooses the pieces that copy engines move (give the ids as an array on the GPU, and "
    "warps pull the rows)"
)


class InPlace(GpuRoute):
    """Warps on a queue of their own, and copies: out of the array on the same, to it on another."""

    name = "pull"

    def __init__(self, array: Array, sms: int | None, timeout_s: float, refused: str) -> None:
        super().__init__(array, timeout_s)
        self._refused = refused
        self._sms = sms or (_SMS if self._in_place else _WAITING_SMS)
        self._side = self._make_queue()
        storage = array._attachment.storage
        self._copies: RowCopies | None = None
        if not why_no_copies(array.service, storage):
            self._copies = RowCopies(self._device, storage, array._format.row_bytes)
            self._out = self._make_queue()

    @property
    def _in_place(self) -> bool:
        return self.array.service.route == "in_place"

    def place(self, ids: object) -> tuple[range | Index, str]:
        if self._copies is not None:
            long_rows = self.array._format.row_bytes >= _PIECE_BYTES_MIN
            if isinstance(ids, range | slice) or (long_rows and not on_gpu(ids)):
                return host_rows(self.array, ids)
        return super().place(ids)

    def _stream(self) -> object:
        return self._side.stream

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        if self._copies is not None:
            # Writes by copies may still take rows from the buffer.
            self._side.after(self._out.handle)
            if _by_copies(chosen):
                sources, places, nbytes = self._pieces(self._copies, chosen)
                pieces = buffer.address + places, sources, nbytes
                self._copy(chosen, pieces, self._side, stream, ticket)
                return
        # A batch passes once. In place its rows need no frame, and rows that lie in frames are
        # taken from there.
        verb = "stream" if self._in_place else "gather"
        if isinstance(chosen, Index) and chosen.held is None:
            which = chosen.address, len(chosen), chosen.itemsize, buffer.address
            calls = self.array._attachment.row_calls
            if calls.queue(verb, which, self._side.handle, stream, self._sms):
                ticket.end = self._side.signal()
                return
        rows = Rows(buffer.address, buffer.rows, None, buffer.library or "numpy")
        self._pull(verb, chosen, rows, stream, ticket)

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        if self._copies is None or not _by_copies(chosen):
            operands = self.array._attachment.operands_for(self._side.stream)
            self._pull("scatter", chosen, operands.source(rows, chosen), stream, ticket)
            return
        source = self.array._attachment.operands.source(rows, chosen)
        ticket.operands = (ticket.operands, source)
        places, at, nbytes = self._pieces(self._copies, chosen)
        self._copy(chosen, (places, source.address + at, nbytes), self._out, stream, ticket)

    # By warps.

    def _pull(
        self, verb: Any, chosen: range | Index, rows: Rows, stream: int, ticket: Ticket
    ) -> None:
        ticket.capture = self._device.capture(stream)
        # The caller's work so far has computed the ids, and has read the buffer that is reused.
        if ticket.capture is None:
            self._side.after(stream)
        else:
            # Our stream takes part in the capture until the batch is taken.
            fork = self._device.mark(stream)
            fork.before(self._side.stream)
            fork.close()
        self.array._queue(verb, chosen, rows, self._side.stream, self._sms)
        ticket.end = self._side.signal()

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        super().wait(ticket, timeout_s)
        self.array.check()

    # By copy engines.

    def _copy(
        self,
        chosen: range | Index,
        pieces: tuple[Numbers, Numbers, Numbers],
        queue: DeviceQueue,
        stream: int,
        ticket: Ticket,
    ) -> None:
        """Queue copies of pieces (targets, sources, bytes) after the caller's work so far."""
        self._refuse_capture(stream, _NO_CAPTURE)
        queue.after(stream)
        ticket.route = "copies"
        act = partial(self._queue_copies, pieces, queue)
        launcher = self.array._attachment.launcher
        launcher.ordered(queue is not self._side, queue.handle, chosen, act)
        ticket.end = queue.signal()

    def _queue_copies(self, pieces: tuple[Numbers, Numbers, Numbers], queue: DeviceQueue) -> None:
        """Write dirty lines back, and copy; after copies to the storage no line is left."""
        assert self._copies is not None
        if self.array.writable:
            self._maintain(("flush_lines",), queue.handle)
        self._copies.queue(*pieces, queue.handle)
        if queue is not self._side:
            self._maintain(("invalidate_lines", "drop_tier"), queue.handle)

    def _maintain(self, kernels: tuple[str, ...], stream: int) -> None:
        """Queue kernels over the array's lines."""
        act = partial(self._maintain_in_turn, kernels, stream)
        endings.holding((self.array.cache.turn,), act)

    def _maintain_in_turn(self, kernels: tuple[str, ...], stream: int) -> None:
        attachment = self.array._attachment
        attachment.join(stream)
        self._device.order(None, stream)
        for name in kernels:
            if name != "drop_tier":
                attachment.launcher.maintain(name, stream=stream)
            elif attachment.launcher.volume.in_host_tier:
                attachment.launcher.drop_tier(stream=stream)

    @staticmethod
    def _pieces(copies: RowCopies, chosen: range | Index) -> tuple[Numbers, Numbers, Numbers]:
        return copies.pieces(chosen if isinstance(chosen, range) else np.asarray(chosen.owner))

    def explain(self) -> Explanation:
        reason = (
            f"warps of at most {self._sms} multiprocessors read rows beside the caller's kernels"
        )
        if self._refused:
            reason += f", because {self._refused}"
        else:
            reason += " (sms=0: host threads)"
        if self._copies is not None:
            reason += (
                f"; copy engines move sequences, and rows of {_PIECE_BYTES_MIN >> 10} KiB and more "
                "whose ids are on the host"
            )
        return self._explained(reason, sms=self._sms)


def _by_copies(chosen: range | Index) -> bool:
    """Return whether the host knows the rows; a list that was copied to the GPU is for warps."""
    return isinstance(chosen, range) or (chosen.checked and chosen.held is None)
