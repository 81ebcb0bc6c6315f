"""The streams of a device: their order, waits for them, events, and captures of CUDA graphs.

Waits have a time limit: `timeout_s`, or else that of `Config`.
"""

# On CPU devices, where launches end before they return, some of it has nothing to do.
# ruff: noqa: B027
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from flashwarp import _native
from flashwarp._jit import cuda_context
from flashwarp._names import renamed
from flashwarp.device.foreign import Stream

if TYPE_CHECKING:
    from flashwarp.device.memory import OwnedStream


@renamed
class Event(ABC):
    """A point in a stream, to wait for or to measure between.

    Attributes
    ----------
    handle : int
        The driver's; 0 on CPU devices.
    """

    handle: int = 0

    @abstractmethod
    def record(self, stream: object = None) -> None:
        """Move the event to the present end of the stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the work before the event has ended."""

    @abstractmethod
    def before(self, stream: object) -> None:
        """Make later work on the stream wait for the event; does not block."""

    @abstractmethod
    def elapsed_ms(self, start: Self) -> float:
        """Return the milliseconds from `start` to this event, both done."""

    def close(self) -> None:
        """Release it. May be called twice."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until done; raises DeviceTimeout."""
        cuda_context.wait_until(self.done, timeout_s, "the event")


class Streams(ABC):
    """The part of a device that orders work, and waits for it."""

    # Captures of CUDA graphs. CPU devices have none.

    def capture(self, stream: object) -> int | None:  # noqa: ARG002
        """Return the number of the capture in which a stream takes part, or None."""
        return None

    def capture_call(self, stream: object, call: _native.WakeCall) -> None:
        """Make each replay of the graph call a C function, which must live as long as the graph.

        The call runs on a thread of the driver's, beside the work that the stream captures next.
        """
        raise NotImplementedError

    def capture_count(self, stream: object, graphs: _native.CudaGraphs) -> None:
        """Count the graph that is being captured in `graphs` for as long as it exists."""
        raise NotImplementedError

    def refuse_capture(self, what: str, instead: str) -> None:
        """Raise CaptureError if a library's current stream is being captured.

        For calls that do their work at once, so that a replay would not repeat it.
        """

    @abstractmethod
    def default_stream(self) -> Stream:
        """Return the library's own stream, which does not wait for the legacy default stream.

        Calls on other streams come after what is queued on it. They look for that from now on at
        every call, because others may queue work there: who only waits for it asks `own_stream`.
        """

    def own_stream(self) -> int:
        """Return the handle of the library's own stream, to wait for it."""
        return 0

    def note_served(self, stream: int | None) -> None:
        """Note that a kernel which host threads serve was launched, at the end of a stream.

        Until it has ended, calls that would keep those threads from the driver wait for it.
        """

    @abstractmethod
    def create_stream(self) -> OwnedStream:
        """Create a stream for work beside the library's own; it waits for no other stream."""

    @abstractmethod
    def current_stream(self, library: str) -> Stream:
        """Return the current stream of a library ("torch", "cupy", ...) on this device."""

    @abstractmethod
    def order(self, before: object, after: object) -> None:
        """Make later work on stream `after` wait for the present work of stream `before`."""

    @abstractmethod
    def wait(self, stream: object = None, timeout_s: float | None = None) -> None:
        """Block until one stream is done; waits for no other stream. Raises DeviceTimeout."""

    def done(self, stream: object) -> bool:  # noqa: ARG002
        """Return whether a stream is done; raises what a kernel on it has failed with."""
        return True

    def idle(self) -> bool:
        """Return whether no work is known to run: of the library's stream, and other libraries'."""
        return True

    def alive(self) -> bool:
        """Return whether kernels can run: after a fault on a GPU none can. Does not block."""
        return True

    @abstractmethod
    def event(self) -> Event:
        """Create an event that can measure time."""

    def mark(self, stream: object) -> Event:
        """Return an event at the present end of a stream; closing it gives it back to a pool."""
        event = self.event()
        event.record(stream)
        return event

    def wait_any(self, events: Sequence[Event], seconds: float) -> None:
        """Wait until one of these events is done, but no longer than this. Raises nothing."""

    def end_calls(self, queues: list[Any]) -> int:
        """End the asynchronous calls of a GPU that are over and need nothing more; see `Calls`.

        Does not wait. Returns what the first calls of the queues need of a thread: 0, nothing; 1,
        to be ended; 2, a failure of a call that is over to be read.
        """
        raise NotImplementedError
