"""The way of batches whose data passes the host: host threads, a pinned ring, copy engines.

No multiprocessor moves data. The calling thread queues everything that CUDA does for a batch, in
advance: the copy of the ids, and for each chunk of the ring a wait for a word, a copy, and the
store of a word. The threads of the engine read lists, move bytes and store words. They never call
CUDA, so a stream that waits for them cannot block them.
"""

# The methods are documented once, by `Way`.
# ruff: noqa: D102
from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from functools import partial
from typing import Any

from flashwarp.array.array import Array
from flashwarp.array.operands import Index
from flashwarp.device import OwnedStream
from flashwarp.errors import (
    BoundsError,
    DeviceTimeout,
    FlashwarpError,
    IndexDtypeError,
    StorageError,
)
from flashwarp.explanation import Explanation
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engine import BatchPort, Direction, Ring
from flashwarp.pipeline.engines import ArrayEngine, make_engine
from flashwarp.pipeline.explanation import explained
from flashwarp.pipeline.ids import host_rows, on_gpu
from flashwarp.pipeline.structs import RequestStruct
from flashwarp.pipeline.ticket import Ticket
from flashwarp.pipeline.ways import CudaWay
from flashwarp.storage import Storage

__all__ = ["CHUNKS", "RingWay", "ring_of"]

_CHUNK_BYTES = 4 << 20
CHUNKS = 16
_ROWS, _SEQUENCE = 0, 1
_NO_CAPTURE = (
    "host threads move the rows, and do not see replays (prefetch before the replay and let the "
    "graph use the buffer, or give sms=4: warps pull the rows then)"
)


def ring_of(chunks: int) -> Ring:
    """Return the size of a pinned ring."""
    return Ring(_CHUNK_BYTES, chunks)


class RingWay(CudaWay):
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
        *,
        only: Direction | None = None,
        lists: bool = True,
    ) -> None:
        super().__init__(array, timeout_s)
        self._reason = reason
        found = array.explain()
        self._path = f"{found.route}: {found.reason}"
        storage = array._attachment.storage
        assert isinstance(storage, Storage)
        self._storage = storage
        self._operands = array._attachment.operands
        settings = (array, batch_rows, depth, workers, timeout_s, ring_of(CHUNKS))
        make = partial(make_engine, *settings, only=only, lists=lists)
        self._own = ArrayEngine(array, make)
        self._copying: dict[Direction, OwnedStream] = {}
        self._streams: list[OwnedStream] = []
        # Batches whose errors the caller has not had: reads that were given to a stream before they
        # had ended, and writes. By direction, oldest first.
        self._unseen: dict[Direction, deque[int]] = {}

    @property
    def own(self) -> ArrayEngine:
        return self._own

    def begin(self) -> None:
        # Stores of before are read past the cache, and nobody else stores from now on.
        self._engine = self._own.begin("a pipeline that reads and writes it past its cache")
        self._ports = {each: _Port(port) for each, port in self._engine.ports.items()}
        self._unseen = {each: deque() for each in self._ports}
        self._submitting = self._make_stream()
        self._copying = {each: self._make_stream() for each in self._ports}

    def _make_stream(self) -> OwnedStream:
        self._streams.append(self._device.create_stream())
        return self._streams[-1]

    # Batches.

    def place(self, ids: object) -> tuple[range | Index, str]:
        self._own.check()
        if not on_gpu(ids):
            # Rows that the host knows stay there: its threads read the list.
            return host_rows(self.array, ids)
        index = self._operands.index(ids)
        if index.itemsize != 8:
            raise IndexDtypeError(
                "ids of dtype int32 on a GPU: batches that pass the host need int64, such as "
                "ids.long()"
            )
        return index, index.library

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        number, port = self._submit("prefetch", chosen, stream)
        copying = self._copying["prefetch"].handle
        # The caller's work so far has read what was in the buffer, and so have writes from it.
        self._device.order(stream, copying)
        if "write_back" in self._copying:
            self._device.order(self._copying["write_back"].handle, copying)
        context, words = self._device.context, port.words
        for q, chunk, begin, nbytes in port.chunks_of(ticket.rows * self._engine.row_bytes):
            context.wait_word(words.filled, q, copying)
            context.call("cuMemcpyAsync", buffer.address + begin, chunk, nbytes, copying)
            context.write_word(words.emptied, q, copying)
        self._end(ticket, self._copying["prefetch"])
        ticket.number = number

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        self._refuse_capture(stream, _NO_CAPTURE)
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
        self._end(ticket, self._copying["write_back"])
        ticket.number = number
        self._unseen["write_back"].append(number)

    def _submit(
        self, direction: Direction, chosen: range | Index, stream: int
    ) -> tuple[int, _Port]:
        """Queue the list and the request of a batch; `ready` is stored when both are there."""
        self._refuse_capture(stream, _NO_CAPTURE)
        port = self._ports[direction]
        self._free_slot(direction, port.number + 1 - port.words.slots)
        port.number = number = port.number + 1
        run = self._submitting.handle
        request = port.request(number)
        request.rows, request.buffer = len(chosen), 0
        request.kind = _SEQUENCE if isinstance(chosen, range) else _ROWS
        request.first = chosen.start if isinstance(chosen, range) else 0
        request.after = sum(each.number for each in self._ports.values() if each is not port)
        context = self._device.context
        if isinstance(chosen, Index) and len(chosen):
            place = port.list_of(number)
            if chosen.checked:
                ctypes.memmove(place, chosen.address, 8 * len(chosen))
            else:
                # The caller's work so far has computed the ids.
                self._device.order(stream, run)
                context.call("cuMemcpyAsync", place, chosen.address, 8 * len(chosen), run)
        context.write_word(port.ready_of(number), number, run)
        self._engine.announce(direction, number)
        return number, port

    def _free_slot(self, direction: Direction, before: int) -> None:
        """See that the ticket whose slot is used again has ended, and that its error is known."""
        if before <= 0:
            return
        if before in self._unseen[direction]:
            self._unseen[direction].remove(before)
            self._engine.wait(direction, before, self._timeout_s)
        elif not self._engine.ended(direction, before):  # it was dropped
            with contextlib.suppress(StorageError, BoundsError):
                self._engine.wait(direction, before, self._timeout_s)

    def finish(self, ticket: Ticket, stream: int) -> None:
        super().finish(ticket, stream)
        if ticket.verb == "write_back":
            self.check()
        elif self._engine.ended(ticket.verb, ticket.number):
            self._engine.check(ticket.verb, ticket.number)
        else:
            self._unseen[ticket.verb].append(ticket.number)

    def check(self) -> None:
        """Raise the first error of batches that were synchronized, or written, and have ended."""
        for direction, unseen in self._unseen.items():
            while unseen and self._engine.ended(direction, unseen[0]):
                self._engine.check(direction, unseen.popleft())

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        super().wait(ticket, timeout_s)
        self._engine.wait(
            ticket.verb, ticket.number, self._timeout_s if timeout_s is None else timeout_s
        )

    def settle(self) -> None:
        """Wait until all batches have ended, and raise the first error that nobody has had."""
        for stream in self._streams:
            self._device.wait(stream, 2 * self._timeout_s + 30)
        failure: FlashwarpError | None = None
        # Streams are done with a batch of writes when the ring has it. The storage has it later.
        for direction, unseen in self._unseen.items():
            while unseen:
                try:
                    self._engine.wait(direction, unseen.popleft(), self._timeout_s)
                except (StorageError, BoundsError) as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def flush(self) -> None:
        self.settle()
        self._storage.flush()

    def explain(self) -> Explanation:
        low, high = self._engine.worker_limits
        return explained(
            self.name,
            f"{self._reason}; copy engines move {CHUNKS} chunks of {_CHUNK_BYTES >> 20} MiB, "
            f"which {low} to {high} host threads fill",
            0,
            high + 1,
            self._path,
        )

    @property
    def engine_stats(self) -> dict[str, Any] | None:
        return self._engine.stats

    def close(self) -> None:
        failure: FlashwarpError | None = None
        try:
            self.settle()
        except DeviceTimeout:
            raise
        except FlashwarpError as error:
            failure = error
        self._own.close()
        self._close(self._streams)
        if failure is not None:
            raise failure


class _Port:
    """Numbers the tickets and chunks of one direction."""

    def __init__(self, words: BatchPort) -> None:
        self.words = words
        self.number = 0
        self._q = 0

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
