"""The way of `workers=` on the CPU device: the engine's threads move rows past the cache."""

# The methods are documented once, by `Way`.
# ruff: noqa: D102
from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from flashwarp.array.array import Array
from flashwarp.array.operands import Index
from flashwarp.errors import FlashwarpError
from flashwarp.explanation import Explanation
from flashwarp.pipeline.buffers import Buffer
from flashwarp.pipeline.engine import BatchEngine, Direction
from flashwarp.pipeline.engines import ArrayEngine, make_engine
from flashwarp.pipeline.explanation import explained
from flashwarp.pipeline.ids import host_rows
from flashwarp.pipeline.ticket import Ticket
from flashwarp.pipeline.ways import Way
from flashwarp.storage import Storage

__all__ = ["WorkerWay"]


class WorkerWay(Way):
    """Host threads read rows to the buffers, and write them, while the caller computes."""

    name = "workers"

    def __init__(
        self,
        array: Array,
        batch_rows: int,
        depth: int,
        workers: int | tuple[int, int],
        timeout_s: float,
    ) -> None:
        super().__init__(array, timeout_s)
        found = array.explain()
        self._path = f"{found.route}: {found.reason}"
        self._storage = array._attachment.storage
        make = partial(make_engine, array, batch_rows, depth, workers, timeout_s)
        self._own = ArrayEngine(array, make)
        self._last: dict[Direction, int] = {}
        # Writes that have not ended, and from which to which address their rows lie.
        self._sources: list[tuple[int, int, int]] = []

    @property
    def own(self) -> ArrayEngine:
        return self._own

    def begin(self) -> None:
        self._engine = self._own.begin("a pipeline that reads and writes it past its cache")

    def place(self, ids: object) -> tuple[range | Index, str]:
        self._own.check()
        return host_rows(self.array, ids)

    def read(self, chosen: range | Index, buffer: Buffer, stream: int, ticket: Ticket) -> None:
        del stream
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
        ticket.end = _End(self._engine, ticket)

    def finish(self, ticket: Ticket, stream: int) -> None:
        del stream
        self.wait(ticket, None)

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        if ticket.end is None:
            return
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._engine.wait(ticket.verb, ticket.number, limit)
        finally:
            if self._engine.ended(ticket.verb, ticket.number):
                ticket.end = ticket.operands = None

    def drop(self, ticket: Ticket) -> None:
        # Its buffer is used until then. Nobody asks for its rows, or for their errors.
        with contextlib.suppress(FlashwarpError):
            self.wait(ticket, None)

    def check(self) -> None:
        """Do nothing: the batches that are waited for raise what they have failed with."""

    def settle(self) -> None:
        for direction, last in self._last.items():
            with contextlib.suppress(FlashwarpError):  # for those who wait for the tickets
                self._engine.wait(direction, last, self._timeout_s)

    def flush(self) -> None:
        assert isinstance(self._storage, Storage)
        self._storage.flush()

    @property
    def engine_stats(self) -> dict[str, Any] | None:
        return self._engine.stats

    def explain(self) -> Explanation:
        low, high = self._engine.worker_limits
        reason = f"{low} to {high} host threads write the buffers"
        return explained(self.name, reason, 0, high + 1, self._path)

    def close(self) -> None:
        self._own.close()


class _End:
    def __init__(self, engine: BatchEngine, ticket: Ticket) -> None:
        self._engine, self._verb, self._number = engine, ticket.verb, ticket.number

    def done(self) -> bool:
        return self._engine.ended(self._verb, self._number)
