"""The route *staged*, of data that passes the host: host threads, a pinned ring, copy engines.

No multiprocessor moves data. The calling thread queues everything that CUDA does for a batch, in
advance: the copy of the ids, and for each chunk of the ring a wait for a word, a copy, and the
store of a word. The threads of the engine read lists, move bytes and store words. They never call
CUDA, so a stream that waits for them cannot block them.
"""

# The methods are documented once, by `Route`.
# ruff: noqa: D102
from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial

from flashwarp.array.array import Array
from flashwarp.errors import (
    BoundsError,
    DeviceTimeout,
    FlashwarpError,
    IndexDtypeError,
    StorageError,
)
from flashwarp.explanation import Explanation
from flashwarp.launch.operands import Index
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engine import BatchDirection, BatchEngine, BatchPort, Ring
from flashwarp.pipeline.ids import host_rows, on_gpu
from flashwarp.pipeline.route import GpuRoute
from flashwarp.pipeline.structs import RequestStruct
from flashwarp.pipeline.ticket import Ticket
from flashwarp.transfer import DeviceQueue

RING = Ring(chunk_bytes=4 << 20, chunks=16)
"""Its size."""

_ROWS, _SEQUENCE = 0, 1
_NO_CAPTURE = (
    "host threads move the rows, and do not see replays (prefetch before the replay and let the "
    "graph use the buffer, or give sms=4: warps pull the rows then)"
)


class Staged(GpuRoute):
    """Host threads read rows to a pinned ring, or write them; copy engines move the chunks."""

    name = "ring"

    def __init__(
        self, array: Array, timeout_s: float, make: Callable[..., BatchEngine], reason: str
    ) -> None:
        super().__init__(array, timeout_s, partial(make, RING))
        self._reason = reason
        self._copying: dict[BatchDirection, DeviceQueue] = {}
        # Batches whose errors the caller has not had: reads that were given to a stream before they
        # had ended, and writes. By direction, oldest first.
        self._unseen: dict[BatchDirection, deque[int]] = {}

    def begin(self) -> None:
        super().begin()
        self._ports = {each: _Port(port) for each, port in self._engine.ports.items()}
        self._unseen = {each: deque() for each in self._ports}
        self._submitting = self._make_queue()
        self._copying = {each: self._make_queue() for each in self._ports}

    # Batches.

    def place(self, ids: object) -> tuple[range | Index, str]:
        assert self.own is not None
        self.own.check()
        if not on_gpu(ids):
            # Rows that the host knows stay there: its threads read the list.
            return host_rows(self.array, ids)
        index = self.array._attachment.operands.index(ids)
        if index.itemsize != 8:
            raise IndexDtypeError(
                "ids of dtype int32 on a GPU: batches that pass the host need int64, such as "
                "ids.long()"
            )
        return index, index.library

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        number, port = self._submit("prefetch", chosen, stream)
        copying, words = self._copying["prefetch"], port.words
        # The caller's work so far has read what was in the buffer, and so have writes from it.
        copying.after(stream)
        if "write_back" in self._copying:
            copying.after(self._copying["write_back"].handle)
        for q, chunk, begin, nbytes in port.chunks_of(ticket.rows * self._engine.row_bytes):
            copying.wait_word(words.filled, q)
            copying.copy([(buffer.address + begin, chunk, nbytes)])
            copying.write_word(words.emptied, q)
        ticket.end = copying.signal()
        ticket.number = number

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        self._refuse_capture(stream, _NO_CAPTURE)
        source = self.array._attachment.operands.source(rows, chosen)
        copying = self._copying["write_back"]
        copying.after(stream)
        if source.held is not None:
            copying.after(None)
        ticket.operands = (ticket.operands, source)
        number, port = self._submit("write_back", chosen, stream)
        words = port.words
        for q, chunk, begin, nbytes in port.chunks_of(ticket.rows * self._engine.row_bytes):
            if q > words.chunks:
                copying.wait_word(words.emptied, q - words.chunks)
            copying.copy([(chunk, source.address + begin, nbytes)])
            copying.write_word(words.filled, q)
        ticket.end = copying.signal()
        ticket.number = number
        self._unseen["write_back"].append(number)

    def _submit(
        self, direction: BatchDirection, chosen: range | Index, stream: int
    ) -> tuple[int, _Port]:
        """Queue the list and the request of a batch; `ready` is stored when both are there."""
        self._refuse_capture(stream, _NO_CAPTURE)
        port = self._ports[direction]
        self._free_slot(direction, port.number + 1 - port.words.slots)
        port.number = number = port.number + 1
        request = port.request(number)
        request.rows, request.buffer = len(chosen), 0
        request.kind = _SEQUENCE if isinstance(chosen, range) else _ROWS
        request.first = chosen.start if isinstance(chosen, range) else 0
        request.after = sum(each.number for each in self._ports.values() if each is not port)
        if isinstance(chosen, Index) and len(chosen):
            place = port.list_of(number)
            if chosen.checked:
                ctypes.memmove(place, chosen.address, 8 * len(chosen))
            else:
                # The caller's work so far has computed the ids.
                self._submitting.after(stream)
                self._submitting.copy([(place, chosen.address, 8 * len(chosen))])
        self._submitting.write_word(port.ready_of(number), number)
        self._engine.announce(direction, number)
        return number, port

    def _free_slot(self, direction: BatchDirection, before: int) -> None:
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
        """Raise the first error of batches that were taken, or written, and have ended."""
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
        for queue in self._queues:
            queue.wait(2 * self._timeout_s + 30)
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
        super().flush()

    def explain(self) -> Explanation:
        low, high = self._engine.worker_limits
        return self._explained(
            f"{self._reason}; copy engines move {RING.chunks} chunks of {RING.chunk_bytes >> 20} "
            f"MiB, which {low} to {high} host threads fill",
            host_threads=high + 1,
        )

    def close(self) -> None:
        failure: FlashwarpError | None = None
        try:
            self.settle()
        except DeviceTimeout:
            raise
        except FlashwarpError as error:
            failure = error
        assert self.own is not None
        self.own.close()  # which ends what the queues wait for
        super().close()
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
