"""`Ticket`: one batch of a pipeline, from its call to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from flashwarp._names import renamed

if TYPE_CHECKING:
    from flashwarp.pipeline.buffers import Buffer
    from flashwarp.pipeline.engine import BatchDirection


class Waiting(Protocol):
    """A route, as far as a ticket needs it."""

    name: str

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Block until a batch has ended."""


@renamed
class Ticket:
    """One batch that was prefetched, or is being written back.

    It keeps the ids and rows of the caller until the batch has ended.

    Attributes
    ----------
    verb : str
        "prefetch" or "write_back".
    rows : int
        How many.
    route : str
        By which route they move.
    """

    def __init__(
        self,
        route: Waiting,
        verb: BatchDirection,
        rows: int,
        buffer: Buffer | None,
        operands: object,
    ) -> None:
        self.verb: BatchDirection = verb
        self.rows = rows
        self.buffer: Any = buffer
        self.operands: object = operands
        self.end: Any = None
        """For the route: what ends it, an event or a future."""
        self.number = 0
        """For the route, if it numbers them."""
        self.route = route.name
        self.library = ""
        """On whose stream it ends; empty: on that of the last batch."""
        self.capture: int | None = None
        """The capture of a CUDA graph that it is part of."""
        self._route = route

    def done(self) -> bool:
        """Return whether the batch has ended, well or not. Never blocks."""
        if self.end is None:
            return True
        # Of a batch in a graph nobody knows how often it ran.
        return self.capture is None and bool(self.end.done())

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the batch has ended, and raise what it has failed with.

        Raises
        ------
        StorageError, BoundsError
            What it has failed with.
        DeviceTimeout
            If it does not end in time; default: in the pipeline's.
        """
        self._route.wait(self, timeout_s)

    def __repr__(self) -> str:
        state = "ended" if self.done() else "in flight"
        return f"<Ticket of {self.verb}, {self.rows} rows, {state}>"
