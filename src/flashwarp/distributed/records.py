"""Records of the shards of a table that is trained: they lie beside the files, and must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from flashwarp.array.array import Array
from flashwarp.errors import CheckpointError
from flashwarp.table.record import Record


def told(path: str) -> dict[str, Any] | None:
    """Return the record of a shard's file, as other ranks are told of it."""
    record = Record.read(path)
    return None if record is None else asdict(record)


def agreed(records: Sequence[dict[str, Any] | None]) -> Record | None:
    """Return what the records of all shards say, but for the rows; None if there are none.

    Raises CheckpointError if they differ.
    """
    found = [each and replace(Record(**each), rows=0) for each in records]
    if len(set(found)) > 1:
        said = ", ".join(f"shard {number} {_said(each)}" for number, each in enumerate(found))
        raise CheckpointError(
            f"the shards of the table were trained differently: {said}. Take all of them from one "
            "checkpoint"
        )
    return found[0] or None


def path_of(local: Array) -> str:
    """Return the file of an open shard."""
    return str(local._attachment.storage.path)


def _said(record: Record | dict[str, Any] | None) -> str:
    if not isinstance(record, Record):
        return "has no record of it"
    more = " and more" if record.changing else ""
    return f"by {record.optimizer} for {record.step}{more} steps"
