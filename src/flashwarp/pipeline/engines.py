"""Engines for arrays: the batch engine over the storage of one, with its settings."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.errors import RouteError
from flashwarp.nvme.software import SoftwareController
from flashwarp.pipeline.engine import BatchDirection, BatchEngine, Ring
from flashwarp.storage import Storage

_SLOTS_MAX = 64
# Of all slots: an id and a status for each row.
_LIST_BYTES_MAX = 16 << 20
_ROW_BYTES_OF_A_LIST = 10


def why_no_engine(array: Array) -> str:
    """Say why host threads cannot move an array's rows; empty if they can."""
    if not array.cache.owned:
        return "the owner of the shared cache moves them"
    if not isinstance(array._attachment.storage, Storage):
        return "its namespace is a drive's, which kernels read by themselves"
    return ""


def make_engine(
    array: Array,
    batch_rows: int,
    depth: int,
    workers: int | tuple[int, int] | None,
    timeout_s: float,
    ring: Ring | None = None,
    *,
    copies: bool = False,
    only: BatchDirection | None = None,
    lists: bool = True,
) -> BatchEngine:
    """Make an engine over the storage of an array.

    It writes, too, if the array takes that; `only` one direction saves the other's ring.
    """
    storage, controller = array._attachment.storage, array._attachment.controller
    refused = why_no_engine(array)
    if refused or not isinstance(storage, Storage):
        raise RouteError(f"host threads cannot move rows of this array: {refused}")
    both: list[BatchDirection] = ["prefetch", "write_back"] if array.writable else ["prefetch"]
    directions = [only] if only in both else both
    return BatchEngine(
        array.device,
        storage,
        rows=len(array),
        row_bytes=max(1, array._format.row_bytes),
        batch_rows=batch_rows,
        slots=_slots(depth, batch_rows),
        directions=directions,
        ring=ring,
        copies=copies,
        workers=workers,
        timeout_s=timeout_s,
        controller=controller if isinstance(controller, SoftwareController) else None,
        lists=lists,
    )


class ArrayEngine:
    """An engine of an array, which it has to itself until `close` if the array is writable.

    `make` makes the engine, which is there from `begin` until `close`.
    """

    def __init__(self, array: Array, make: Callable[[], BatchEngine]) -> None:
        self.array, self._make = array, make
        self.engine: BatchEngine | None = None

    def begin(self, holder: str, before: ArrayEngine | None = None) -> BatchEngine:
        """Take the array over, and start the engine; `holder` says who has the array, in errors.

        If an engine `before` has it, whose batches have ended, that one loses it. After an
        interrupt `close` gives back what was taken.
        """
        if self.array.writable:
            self.array._turns.hand_over(self, holder, before)
        endings.uninterrupted(self._start)
        assert self.engine is not None
        return self.engine

    def _start(self) -> None:
        self.engine = self._make()

    def check(self) -> None:
        """Raise ArgumentError if another one has the array now."""
        self.array._turns.refuse_others(self)

    def close(self) -> None:
        """End the engine, and give the array back. May be called twice."""
        if self.engine is not None:
            self.engine.close()
        self.array._turns.take_back(self)


def _slots(depth: int, batch_rows: int) -> int:
    """Return how many batches the calling thread may be ahead of the storage: a power of two."""
    least = 1 << math.ceil(math.log2(2 * (depth + 1)))
    fit = _LIST_BYTES_MAX // (_ROW_BYTES_OF_A_LIST * batch_rows)
    return max(least, min(_SLOTS_MAX, 1 << max(0, fit.bit_length() - 1)))
