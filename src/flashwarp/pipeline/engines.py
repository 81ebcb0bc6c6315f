"""Engines for arrays: the batch engine over the storage of one, with its settings."""

from __future__ import annotations

import math

from flashwarp.array.array import Array
from flashwarp.errors import DataPathError
from flashwarp.nvme.software import SoftwareController
from flashwarp.pipeline.engine import BatchEngine, Direction, Ring
from flashwarp.storage import Storage

__all__ = ["make_engine", "why_no_engine"]

_SLOTS_MAX = 64
# Of all slots: an id and a status for each row.
_LIST_BYTES_MAX = 16 << 20
_ROW_BYTES_OF_A_LIST = 10


def why_no_engine(array: Array) -> str:
    """Say why host threads cannot move an array's rows; empty if they can."""
    if not isinstance(array._attachment.storage, Storage):
        return "its namespace is a drive's, which kernels read by themselves"
    if array.device.kind == "cuda" and not array.device.waits_for_words:
        return "the driver has no waits of streams for words"
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
    only: Direction | None = None,
    lists: bool = True,
) -> BatchEngine:
    """Make an engine over the storage of an array.

    It writes, too, if the array takes that; `only` one direction saves the other's ring.
    """
    storage, controller = array._attachment.storage, array._attachment.controller
    refused = why_no_engine(array)
    if refused or not isinstance(storage, Storage):
        raise DataPathError(f"host threads cannot move rows of this array: {refused}")
    both: list[Direction] = ["prefetch", "write_back"] if array.writable else ["prefetch"]
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


def _slots(depth: int, batch_rows: int) -> int:
    """Return how many batches the calling thread may be ahead of the storage: a power of two."""
    least = 1 << math.ceil(math.log2(2 * (depth + 1)))
    fit = _LIST_BYTES_MAX // (_ROW_BYTES_OF_A_LIST * batch_rows)
    return max(least, min(_SLOTS_MAX, 1 << max(0, fit.bit_length() - 1)))
