"""`Route`: how the rows of a batch travel, and what routes have in common.

There are three: *in place* (the GPU reads the storage itself), *staged* (host threads and a pinned
ring) and *host* (the CPU device). `choice.choose_route` takes one for each pipeline.
"""

# The methods are documented once, by `Route`.
# ruff: noqa: D102
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from flashwarp.array.array import Array
from flashwarp.device import CudaDevice
from flashwarp.errors import CaptureError, ClosedError, DeviceTimeout, FlashwarpError
from flashwarp.explanation import Explanation
from flashwarp.launch.operands import Index, in_memory
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.pipeline.engines import ArrayEngine
from flashwarp.pipeline.ticket import Ticket
from flashwarp.storage import Storage
from flashwarp.transfer import DeviceQueue


class Route(ABC):
    """How batches travel. All calls are those of one pipeline, one at a time.

    `timeout_s` limits each wait. `make` makes an engine of batches, which has the array from
    `begin` to `close`.
    """

    name: str

    def __init__(
        self, array: Array, timeout_s: float, make: Callable[[], BatchEngine] | None = None
    ) -> None:
        self.array = array
        self._timeout_s = timeout_s
        self.own = None if make is None else ArrayEngine(array, make)
        """The engine of its own, which may have the array."""

    @property
    def _engine(self) -> BatchEngine:
        engine = None if self.own is None else self.own.engine
        assert engine is not None
        return engine

    def begin(self) -> None:
        """Take what the route owns. After it has raised, `close` gives back what was taken."""
        if self.own is not None:
            # Stores of before are read past the cache, and nobody else stores from now on.
            self.own.begin("a pipeline that reads and writes it past its cache")

    def place(self, ids: object) -> tuple[range | Index, str]:
        """Check ids, and place them where they are read. Returns the library of their caller."""
        chosen = self.array._place_ids(in_memory(ids), self._stream())
        return chosen, "" if isinstance(chosen, range) else chosen.library

    def _stream(self) -> object:
        """Return the stream on which operands are placed; None: the library's own."""
        return None

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
        """Forget a batch that nobody takes."""

    def check(self) -> None:
        """Raise what earlier batches are known to have failed with. Does not wait."""
        self.array.check()

    def settle(self) -> None:  # noqa: B027 - who takes the array over waits for its calls
        """Wait until no batch of an engine of its own is under way."""

    def flush(self) -> None:
        """Make what was written durable. Waits."""
        storage = self.array if self.own is None else self.array._attachment.storage
        assert isinstance(storage, Array | Storage)
        storage.flush()

    @property
    def engine_stats(self) -> dict[str, Any] | None:
        """The counters of the engine's threads, and why their number changed; None: it has none."""
        return None if self.own is None else self._engine.stats

    @abstractmethod
    def explain(self) -> Explanation:
        """Explain the route."""

    def _explained(self, reason: str, *, sms: int = 0, host_threads: int = 0) -> Explanation:
        found = self.array.explain()
        array = f"{found.route}: {found.reason}"
        facts = {"multiprocessors": sms, "host_threads": host_threads, "array": array}
        return Explanation(self.name, reason, facts)

    def close(self) -> None:
        """Wait for what is in flight, and release what the route owns."""
        if self.own is not None:
            self.own.close()


class GpuRoute(Route):
    """Batches that end with a signal of one of the pipeline's own queues."""

    def __init__(
        self, array: Array, timeout_s: float, make: Callable[[], BatchEngine] | None = None
    ) -> None:
        super().__init__(array, timeout_s, make)
        assert isinstance(array.device, CudaDevice)
        self._device = array.device
        self._queues: list[DeviceQueue] = []

    def _make_queue(self) -> DeviceQueue:
        self._queues.append(DeviceQueue(self._device))
        return self._queues[-1]

    def _refuse_capture(self, stream: int, why: str) -> None:
        if self._device.capture(stream) is not None:
            raise CaptureError(f"{why}, so the batch cannot become part of a CUDA graph")

    def check_capture(self, ticket: Ticket, stream: int) -> None:
        if self._device.capture(stream) != ticket.capture:
            where = "outside of a capture" if ticket.capture is None else "in a capture"
            raise CaptureError(
                f"a batch to {ticket.verb} begins {where} and would end elsewhere: start it and "
                "take it in the same capture, or both outside of one"
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
        end, ticket.end = ticket.end, None
        if end is not None:
            # Waits look at what the event recorded when they were queued, so it may be used again.
            end.close()

    def close(self) -> None:
        """Wait for the queues, and release them; raises what they have failed with."""
        failure: FlashwarpError | None = None
        for queue in self._queues:
            try:
                queue.wait(self._timeout_s)
            except DeviceTimeout:
                raise  # what runs still uses the memory
            except ClosedError:
                break  # the device was closed, after all that ran on it
            except FlashwarpError as error:
                failure = failure or error
        super().close()
        for queue in self._queues:
            self.array._attachment.end_stream(queue)
        if failure is not None:
            raise failure
