"""The route *host*: threads of the CPU device write the buffers, while the caller computes.

They are those of the array, which read through its cache, or with `workers=` those of an engine of
batches, which read past it.
"""

# The methods are documented once, by `Route`.
# ruff: noqa: D102
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flashwarp.array.array import Array
from flashwarp.errors import DeviceTimeout, FlashwarpError
from flashwarp.explanation import Explanation
from flashwarp.launch.operands import Index
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engine import BatchDirection, BatchEngine
from flashwarp.pipeline.ids import host_rows
from flashwarp.pipeline.route import Route
from flashwarp.pipeline.ticket import Ticket


class Host(Route):
    """Batches that end with a future of the array, or with a ticket of the engine."""

    def __init__(
        self, array: Array, timeout_s: float, make: Callable[[], BatchEngine] | None
    ) -> None:
        super().__init__(array, timeout_s, make)
        self.name = "direct" if make is None else "workers"
        self._last: dict[BatchDirection, int] = {}
        # Writes of the engine that have not ended, and from which to which address their rows lie.
        self._sources: list[tuple[int, int, int]] = []

    def place(self, ids: object) -> tuple[range | Index, str]:
        if self.own is None:
            return super().place(ids)
        self.own.check()
        return host_rows(self.array, ids)

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        del stream
        if self.own is None:
            ticket.end = self.array.gather_async(_key(chosen), buffer.rows) if ticket.rows else None
            return
        begin = buffer.address
        end = begin + ticket.rows * self._engine.row_bytes
        for number, first, last in self._sources:
            if first < end and begin < last:
                # Its errors are for those who wait for the write.
                with contextlib.suppress(FlashwarpError):
                    self._engine.wait("write_back", number, self._timeout_s)
        self._submit(ticket, chosen, begin)

    def write(self, chosen: range | Index, rows: object, stream: int, ticket: Ticket) -> None:
        del stream
        if self.own is None:
            values = np.asarray(rows)
            ticket.end = self.array.scatter_async(_key(chosen), values) if ticket.rows else None
            return
        source = self.array._attachment.operands.source(rows, chosen)
        ticket.operands = (ticket.operands, source)
        self._submit(ticket, chosen, source.address)
        end = source.address + ticket.rows * self._engine.row_bytes
        pending = [each for each in self._sources if not self._engine.ended("write_back", each[0])]
        self._sources = [*pending, (ticket.number, source.address, end)]

    def _submit(self, ticket: Ticket, chosen: range | Index, address: int) -> None:
        ids: Any = chosen if isinstance(chosen, range) else chosen.owner
        before = self._last.get(ticket.verb, 0) + 1 - self._engine.ports[ticket.verb].slots
        if before > 0 and not self._engine.ended(ticket.verb, before):
            self._engine.wait(ticket.verb, before, self._timeout_s)
        ticket.number = self._last[ticket.verb] = self._engine.submit(ticket.verb, ids, address)
        ticket.end = _End(self._engine, ticket.verb, ticket.number)

    def finish(self, ticket: Ticket, stream: int) -> None:
        del stream
        self.wait(ticket, None)

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        end, limit = ticket.end, self._timeout_s if timeout_s is None else timeout_s
        if end is None:
            return
        began = time.monotonic()
        try:
            end.result(limit)
        except TimeoutError as error:
            if self.own is not None:
                raise
            raise DeviceTimeout(
                f"a batch of {ticket.rows} rows to {ticket.verb} has not ended after "
                f"{time.monotonic() - began:.1f} s (limit {limit:g} s): its storage does not answer"
            ) from error
        finally:
            if end.done():
                ticket.end = ticket.operands = None

    def drop(self, ticket: Ticket) -> None:
        # Its buffer is used until then. Nobody asks for its rows, or for their errors.
        try:
            self.wait(ticket, None)
        except DeviceTimeout:
            raise
        except FlashwarpError:
            pass

    def check(self) -> None:
        """Raise as the array does. Batches of the engine raise when they are waited for."""
        if self.own is None:
            super().check()

    def settle(self) -> None:
        for direction, last in self._last.items():
            with contextlib.suppress(FlashwarpError):  # for those who wait for the tickets
                self._engine.wait(direction, last, self._timeout_s)

    def explain(self) -> Explanation:
        if self.own is None:
            threads = getattr(self.array.device, "threads", 1)
            reason = "the threads of the CPU device write the buffers"
            return self._explained(reason, host_threads=threads)
        low, high = self._engine.worker_limits
        reason = f"{low} to {high} host threads write the buffers"
        return self._explained(reason, host_threads=high + 1)


class _End:
    """The end of a batch of the engine, as a future has it."""

    def __init__(self, engine: BatchEngine, verb: BatchDirection, number: int) -> None:
        self._engine, self._verb, self._number = engine, verb, number

    def done(self) -> bool:
        return self._engine.ended(self._verb, self._number)

    def result(self, timeout_s: float) -> None:
        self._engine.wait(self._verb, self._number, timeout_s)


def _key(chosen: range | Index) -> Any:
    return slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen.owner
