"""How the rows of a batch move.

A few warps pull them on a stream of the pipeline's own, or the threads of the CPU device copy them.
"""

# The methods are documented once, by `Way`.
# ruff: noqa: D102
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashwarp.array.array import Array
from flashwarp.array.operands import Index, Rows
from flashwarp.device import CudaDevice, Event, OwnedStream
from flashwarp.errors import CaptureError, ClosedError, DeviceTimeout, FlashwarpError
from flashwarp.explanation import Explanation
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engines import ArrayEngine
from flashwarp.pipeline.explanation import explained
from flashwarp.pipeline.ticket import Ticket

__all__ = ["CpuWay", "CudaWay", "PullWay", "Way"]

# Multiprocessors whose loads fill PCIe 5: what one can have on its way is a quarter of the link.
_SMS = 4
# Those whose warps wait for commands.
_WAITING_SMS = 8


class Way(ABC):
    """How batches move. All calls are those of one pipeline, one at a time."""

    name: str

    def __init__(self, array: Array, timeout_s: float) -> None:
        self.array = array
        self._timeout_s = timeout_s

    def place(self, ids: object) -> tuple[range | Index, str]:
        """Check ids, and place them where they are read. Returns the library of their caller."""
        chosen = self.array._place_ids(ids, self._stream())
        return chosen, "" if isinstance(chosen, range) else chosen.library

    def _stream(self) -> object:
        """Return the stream on which operands are placed; None: the library's own."""
        return None

    def begin(self) -> None:  # noqa: B027 - some ways own nothing
        """Take what the way owns. After it has raised, `close` gives back what was taken."""

    @abstractmethod
    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        """Start the reading of rows to a buffer, in the order of the caller's stream."""

    @abstractmethod
    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        """Start the storing of rows, in the order of the caller's stream."""

    def check_capture(self, ticket: Ticket, stream: int) -> None:  # noqa: B027
        """Raise CaptureError if a batch cannot end where a stream is now."""

    @abstractmethod
    def finish(self, ticket: Ticket, stream: int) -> None:
        """Put the end of a batch before later work of the caller's stream."""

    @abstractmethod
    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Block until a batch has ended."""

    @abstractmethod
    def drop(self, ticket: Ticket) -> None:
        """Forget a batch that nobody synchronizes."""

    def check(self) -> None:
        """Raise what earlier batches are known to have failed with. Does not wait."""
        self.array.check()

    @property
    def own(self) -> ArrayEngine | None:
        """The engine of its own, which may have the array."""
        return None

    def settle(self) -> None:  # noqa: B027 - who takes the array over waits for its calls
        """Wait until no batch of an engine of its own is under way."""

    def flush(self) -> None:
        """Make what was written durable. Waits."""
        self.array.flush()

    @property
    def engine_stats(self) -> dict[str, Any] | None:
        """The counters of the engine's threads, and why their number changed; None: it has none."""
        return None

    @abstractmethod
    def explain(self) -> Explanation:
        """Explain the way."""

    def close(self) -> None:  # noqa: B027 - some ways own nothing
        """Wait for what is in flight, and release what the way owns."""


class CudaWay(Way):
    """Batches that end with an event of a stream of the pipeline's own. Events are used again."""

    def __init__(self, array: Array, timeout_s: float) -> None:
        super().__init__(array, timeout_s)
        assert isinstance(array.device, CudaDevice)
        self._device = array.device
        self._free: list[Event] = []
        self._all: list[Event] = []

    def _take_event(self) -> Event:
        if not self._free:
            self._free.append(self._device.event())
            self._all.append(self._free[-1])
        return self._free.pop()

    def _end(self, ticket: Ticket, stream: OwnedStream) -> None:
        """Let the present end of a stream be a batch's end."""
        ticket.end = self._take_event()
        ticket.end.record(stream)

    def _refuse_capture(self, stream: int, why: str) -> None:
        if self._device.capture(stream) is not None:
            raise CaptureError(f"{why}, so the batch cannot become part of a CUDA graph")

    def check_capture(self, ticket: Ticket, stream: int) -> None:
        if self._device.capture(stream) != ticket.capture:
            raise CaptureError(
                f"a batch to {ticket.verb} begins {_where(ticket.capture)} and would end elsewhere:"
                " start it and take it in the same capture, or both outside of one"
            )

    def finish(self, ticket: Ticket, stream: int) -> None:
        if ticket.end is not None:
            ticket.end.before(stream)
        self.drop(ticket)
        ticket.operands = None

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        if ticket.capture is not None:
            raise CaptureError("a batch in a CUDA graph has no end of its own: wait for the stream")
        if ticket.end is not None:
            ticket.end.wait(self._timeout_s if timeout_s is None else timeout_s)

    def drop(self, ticket: Ticket) -> None:
        if ticket.end is not None:
            # Waits look at what the event recorded when they were queued, so it may be used again.
            self._free.append(ticket.end)
            ticket.end = None

    def _close(self, streams: Sequence[OwnedStream]) -> None:
        """Wait for streams of ours, and release them; raises what they have failed with."""
        failure: FlashwarpError | None = None
        for stream in streams:
            try:
                self._device.wait(stream, self._timeout_s)
            except DeviceTimeout:
                raise  # what runs still uses the memory
            except ClosedError:
                break  # the device was closed, after all that ran on it
            except FlashwarpError as error:
                failure = failure or error
        for event in self._all:
            event.close()
        self._all.clear()
        self._free.clear()
        for stream in streams:
            # The array waits for its streams when it closes: it must not know one that is gone.
            self.array._attachment.forget_stream(stream.handle)
            stream.close()
        if failure is not None:
            raise failure


class PullWay(CudaWay):
    """Warps of a GPU read rows in place or by commands, on a stream of the pipeline's own."""

    name = "pull"

    def __init__(
        self, array: Array, sms: int | None, timeout_s: float, why_no_ring: str = ""
    ) -> None:
        super().__init__(array, timeout_s)
        self._why_no_ring = why_no_ring
        self._sms = sms or (_SMS if self._in_place else _WAITING_SMS)
        self._side: OwnedStream = self._device.create_stream()

    def _stream(self) -> object:
        return self._side

    @property
    def _in_place(self) -> bool:
        return self.array.service.route == "in_place"

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        rows = Rows(buffer.address, buffer.rows, None, buffer.library or "numpy")
        # A batch passes once. In place its rows need no frame, and rows that lie in frames are
        # taken from there.
        self._queue("stream" if self._in_place else "gather", chosen, rows, stream, ticket)

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        operands = self.array._operands_of(self._side)
        self._queue("scatter", chosen, operands.source(rows, chosen), stream, ticket)

    def _queue(
        self, verb: Any, chosen: range | Index, rows: Rows, stream: int, ticket: Ticket
    ) -> None:
        ticket.capture = self._device.capture(stream)
        # The caller's work so far has computed the ids, and has read the buffer that is reused.
        if ticket.capture is None:
            self._device.order(stream, self._side.handle)
        else:
            self._fork(stream)
        self.array._queue(verb, chosen, rows, self._side, self._sms)
        self._end(ticket, self._side)

    def _fork(self, stream: int) -> None:
        """Let our stream take part in a capture, until the batch is synchronized."""
        fork = self._take_event()
        fork.record(stream)
        fork.before(self._side)
        self._free.append(fork)

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        super().wait(ticket, timeout_s)
        self.array.check()

    def explain(self) -> Explanation:
        found = self.array.explain()
        return explained(
            self.name,
            f"warps of at most {self._sms} multiprocessors read rows beside the caller's kernels"
            + (f", because {self._why_no_ring}" if self._why_no_ring else " (sms=0: host threads)"),
            self._sms,
            0,
            f"{found.route}: {found.reason}",
        )

    def close(self) -> None:
        self._close([self._side])


def _where(capture: int | None) -> str:
    return "outside of a capture" if capture is None else "in a capture"


class CpuWay(Way):
    """Threads of the CPU device move rows in the background, one batch after the other."""

    name = "direct"

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        del stream
        ids = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen.owner
        ticket.end = self.array.gather_async(ids, buffer.rows) if ticket.rows else None

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        del stream
        ids: Any = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen.owner
        ticket.end = self.array.scatter_async(ids, np.asarray(rows)) if ticket.rows else None

    def finish(self, ticket: Ticket, stream: int) -> None:
        del stream
        self.wait(ticket, None)

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        future, limit = ticket.end, self._timeout_s if timeout_s is None else timeout_s
        if future is None:
            return
        began = time.monotonic()
        try:
            future.result(limit)
        except TimeoutError as error:
            raise DeviceTimeout(
                f"a batch of {ticket.rows} rows to {ticket.verb} has not ended after "
                f"{time.monotonic() - began:.1f} s (limit {limit:g} s): its storage does not answer"
            ) from error
        finally:
            if future.done():
                ticket.end, ticket.operands = None, None

    def drop(self, ticket: Ticket) -> None:
        if ticket.end is not None:
            # Its buffer is used until then. Nobody asks for its rows, or for their errors.
            ticket.end.exception(self._timeout_s)
            ticket.end = None

    def explain(self) -> Explanation:
        found = self.array.explain()
        threads = getattr(self.array.device, "threads", 1)
        reason = "the threads of the CPU device write the buffers"
        return explained(self.name, reason, 0, threads, f"{found.route}: {found.reason}")
