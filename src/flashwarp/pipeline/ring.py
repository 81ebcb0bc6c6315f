"""The way of batches whose data passes the host: host threads, a pinned ring, copy engines.

No multiprocessor moves data. The calling thread queues everything that CUDA does for a batch, in
advance: the copy of the ids, and for each chunk of the ring a wait for a word, a copy, and the
store of a word. The threads of the engine read lists, move bytes and store words. They never call
CUDA, so a stream that waits for them cannot block them.
"""

# The methods are documented once, by `Way`.
# ruff: noqa: D102
from __future__ import annotations

import ctypes
import math
from collections import deque
from typing import Any

import numpy as np

from flashwarp.array.array import Array
from flashwarp.array.operands import Index, host_index, is_foreign
from flashwarp.array.rows import host_indices
from flashwarp.array.selection import rows_of_slice
from flashwarp.device import CudaDevice, Event, OwnedStream
from flashwarp.errors import CaptureError, DeviceTimeout, FlashwarpError, IndexDtypeError
from flashwarp.nvme.software import SoftwareController
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engine import BatchEngine, BatchPort, Direction, Ring
from flashwarp.pipeline.explanation import PipelineExplanation
from flashwarp.pipeline.structs import RequestStruct, ResultStruct
from flashwarp.pipeline.ticket import Ticket
from flashwarp.pipeline.ways import Way
from flashwarp.storage import Storage

__all__ = ["RingWay", "why_no_ring"]

_CHUNK_BYTES = 4 << 20
_CHUNKS = 16
_ROWS, _SEQUENCE = 0, 1


def why_no_ring(array: Array) -> str:
    """Say why host threads cannot move an array's rows; empty if they can."""
    if not isinstance(array._attachment.storage, Storage):
        return "its namespace is a drive's, which kernels read by themselves"
    if not isinstance(array.device, CudaDevice) or not array.device.waits_for_words:
        return "the driver has no waits of streams for words"
    return ""


class RingWay(Way):
    """Host threads read rows to a pinned ring, or write them; copy engines move the chunks."""

    name = "ring"

    def __init__(
        self,
        array: Array,
        batch_rows: int,
        depth: int,
        workers: int | tuple[int, int] | None,
        timeout_s: float,
        reason: str,
    ) -> None:
        super().__init__(array, timeout_s)
        device = array.device
        assert isinstance(device, CudaDevice)
        self._device = device
        self._reason = reason
        found = array.explain()
        self._path = f"{found.path}: {found.reason}"
        storage, controller = array._attachment.storage, array._attachment.controller
        assert isinstance(storage, Storage)
        self._storage = storage
        self._operands = array._attachment.operands
        directions: list[Direction] = ["prefetch"]
        if array.writable:
            # Stores of before are read past the cache, and nobody else stores from now on.
            array.flush()
            directions.append("write_back")
        self._engine = BatchEngine(
            device,
            storage,
            rows=len(array),
            row_bytes=max(1, array._format.row_bytes),
            batch_rows=batch_rows,
            # The calling thread may be so many batches ahead of the storage.
            slots=1 << math.ceil(math.log2(2 * (depth + 1))),
            directions=directions,
            ring=Ring(_CHUNK_BYTES, _CHUNKS),
            workers=workers,
            timeout_s=timeout_s,
            controller=controller if isinstance(controller, SoftwareController) else None,
        )
        self._ports = {each: _Port(self._engine.ports[each]) for each in directions}
        self._submitting: OwnedStream = device.create_stream()
        self._copying: dict[Direction, OwnedStream] = {
            each: device.create_stream() for each in directions
        }
        self._free: list[Event] = []
        self._all: list[Event] = []
        # Batches that were given to a stream before they had ended: their errors come later.
        self._unseen: deque[tuple[Direction, int]] = deque()
        if array.writable:
            array._hand_over("a pipeline that reads and writes it past its cache")

    # Batches.

    def place(self, ids: object) -> tuple[range | Index, str]:
        length = len(self.array)
        if isinstance(ids, range):
            ids = np.arange(ids.start, ids.stop, ids.step)
        if isinstance(ids, slice):
            rows = rows_of_slice(ids, length)
            if rows.step == 1 or len(rows) < 2:
                return rows, ""
            ids = host_index(rows)
        library = "numpy"
        if is_foreign(ids):
            seen = self._device.view(ids)
            if seen.device_kind == "cuda":
                index = self._operands.index(ids)
                if index.itemsize != 8:
                    raise IndexDtypeError(
                        "ids of dtype int32 on a GPU: batches that pass the host need int64, such "
                        "as ids.long()"
                    )
                return index, index.library
            given: Any = ids
            ids, library = np.from_dlpack(given), seen.library
        # Rows that the host knows stay there: its threads read the list.
        host = np.ascontiguousarray(host_indices(ids, length))
        return Index(host.ctypes.data, host.shape, 8, library, host), library

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        self.check()
        number, port = self._submit("prefetch", chosen, stream)
        copying = self._copying["prefetch"].handle
        # The caller's work so far has read what was in the buffer.
        self._device.order(stream, copying)
        context, words = self._device.context, port.words
        for q, chunk, begin, nbytes in port.chunks_of(ticket.rows * self._engine.row_bytes):
            context.wait_word(words.filled, q, copying)
            context.call("cuMemcpyAsync", buffer.address + begin, chunk, nbytes, copying)
            context.write_word(words.emptied, q, copying)
        ticket.end = self._event(copying)
        ticket.number = number

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        self.check()
        source = self._operands.source(rows, chosen)
        copying = self._copying["write_back"].handle
        self._device.order(stream, copying)
        if source.held is not None:
            self._device.order(None, copying)
        ticket.operands = (ticket.operands, source)
        port = self._ports["write_back"]
        context, words = self._device.context, port.words
        number, _ = self._submit("write_back", chosen, stream)
        for q, chunk, begin, nbytes in port.chunks_of(ticket.rows * self._engine.row_bytes):
            if q > words.chunks:
                context.wait_word(words.emptied, q - words.chunks, copying)
            context.call("cuMemcpyAsync", chunk, source.address + begin, nbytes, copying)
            context.write_word(words.filled, q, copying)
        ticket.end = self._event(copying)
        ticket.number = number

    def _submit(
        self, direction: Direction, chosen: range | Index, stream: int
    ) -> tuple[int, _Port]:
        """Queue the list and the request of a batch; `ready` is stored when both are there."""
        if self._device.capture(stream) is not None:
            raise CaptureError(
                "batches that pass the host cannot become part of a CUDA graph, whose replays the "
                "host's threads do not see: prefetch before the replay and let the graph use the "
                "buffer, or use a pipeline whose rows are read in place (explain() says why not)"
            )
        port = self._ports[direction]
        number = port.take(self._engine, direction, self._timeout_s)
        run = self._submitting.handle
        request = port.request(number)
        request.rows, request.buffer = len(chosen), 0
        request.kind = _SEQUENCE if isinstance(chosen, range) else _ROWS
        request.first = chosen.start if isinstance(chosen, range) else 0
        context = self._device.context
        if isinstance(chosen, Index) and len(chosen):
            place = port.list_of(number)
            if chosen.checked:
                ctypes.memmove(place, chosen.address, 8 * len(chosen))
            else:
                # The caller's work so far has computed the ids.
                self._device.order(stream, run)
                context.call("cuMemcpyAsync", place, chosen.address, 8 * len(chosen), run)
        written = self._ports.get("write_back")
        if direction == "prefetch" and written is not None and written.number:
            # What was written before is read.
            context.wait_word(written.done_of(written.number), written.number, run)
        context.write_word(port.ready_of(number), number, run)
        self._engine.announce(direction, number)
        return number, port

    def _event(self, stream: int) -> Event:
        if not self._free:
            self._free.append(self._device.event())
            self._all.append(self._free[-1])
        event = self._free.pop()
        event.record(stream)
        return event

    def finish(self, ticket: Ticket, stream: int) -> None:
        event, ticket.end = ticket.end, None
        event.wait_on(stream)
        # Waits look at what the event recorded when they were queued, so it may be used again.
        self._free.append(event)
        self._unseen.append((ticket.verb, ticket.number))
        ticket.operands = None
        self.check()

    def check(self) -> None:
        """Raise the first error of batches that have ended by now."""
        while self._unseen and self._engine.ended(*self._unseen[0]):
            self._engine.check(*self._unseen.popleft())

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        limit = self._timeout_s if timeout_s is None else timeout_s
        if ticket.end is not None:
            ticket.end.wait(limit)
        self._engine.wait(ticket.verb, ticket.number, limit)

    def drop(self, ticket: Ticket) -> None:
        if ticket.end is not None:
            self._free.append(ticket.end)
            ticket.end = None

    def settle(self) -> None:
        """Wait until all batches have ended, and raise the first error."""
        for stream in (self._submitting, *self._copying.values()):
            self._device.synchronize(stream, 2 * self._timeout_s + 30)
        for direction, port in self._ports.items():
            if port.number:
                self._engine.wait(direction, port.number, 2 * self._timeout_s + 30)
        self.check()

    def flush(self) -> None:
        self.settle()
        self._storage.flush()

    def explain(self) -> PipelineExplanation:
        low, high = self._engine.worker_limits
        return PipelineExplanation(
            self.name,
            f"{self._reason}; copy engines move {_CHUNKS} chunks of {_CHUNK_BYTES >> 20} MiB, "
            f"which {low} to {high} host threads fill",
            0,
            high + 1,
            self._path,
        )

    @property
    def engine_stats(self) -> dict[str, Any]:
        """The counters of the host threads, and why their number changed."""
        return self._engine.stats()

    def close(self) -> None:
        failure: FlashwarpError | None = None
        try:
            self.settle()
        except DeviceTimeout:
            raise
        except FlashwarpError as error:
            failure = error
        self._engine.close()
        for event in self._all:
            event.close()
        for stream in (self._submitting, *self._copying.values()):
            stream.close()
        if self.array.writable:
            self.array._take_back()
        if failure is not None:
            raise failure


class _Port:
    """Numbers the tickets and chunks of one direction."""

    def __init__(self, words: BatchPort) -> None:
        self.words = words
        self.number = 0
        self._q = 0

    def take(self, engine: BatchEngine, direction: Direction, timeout_s: float) -> int:
        """Return the next ticket, whose slot is free; that of so many batches before has ended."""
        number = self.number + 1
        before = number - self.words.slots
        if before > 0 and not engine.ended(direction, before):
            engine.wait(direction, before, timeout_s)
        self.number = number
        return number

    def chunks_of(self, nbytes: int) -> list[tuple[int, int, int, int]]:
        """Number the next chunks: each one's number, address, first byte and bytes."""
        words = self.words
        found = []
        for begin in range(0, nbytes, words.step_bytes):
            self._q += 1
            at = words.ring + (self._q - 1) % words.chunks * words.chunk_bytes
            found.append((self._q, at, begin, min(words.step_bytes, nbytes - begin)))
        return found

    def _slot(self, number: int) -> int:
        return number % self.words.slots

    def request(self, number: int) -> RequestStruct:
        """Return the request of a ticket, in the memory that the engine reads."""
        return RequestStruct.from_address(
            self.words.requests + self._slot(number) * ctypes.sizeof(RequestStruct)
        )

    def ready_of(self, number: int) -> int:
        """Return the address of its `ready`."""
        at = self.words.requests + self._slot(number) * ctypes.sizeof(RequestStruct)
        return at + RequestStruct.ready.offset

    def list_of(self, number: int) -> int:
        """Return the address of its list."""
        return self.words.lists + self._slot(number) * self.words.rows_max * 8

    def done_of(self, number: int) -> int:
        """Return the address of the word that becomes its number at its end."""
        at = self.words.results + self._slot(number) * ctypes.sizeof(ResultStruct)
        return at + ResultStruct.done.offset
