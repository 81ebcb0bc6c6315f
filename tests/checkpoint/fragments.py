"""The fragments of a cache's table one by one, and what holds of all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from flashwarp.checkpoint.buffer import GAP, FragmentTable


class Fragment(NamedTuple):
    """One row of the table, and whose it is; None: a gap."""

    key: Hashable | None
    offset: int
    nbytes: int
    ready_ns: int
    urgency: int
    pinned: int
    used: int


def fragments(table: FragmentTable) -> list[Fragment]:
    """Return all fragments in address order."""
    rows = zip(table.owners(), table.columns().T.tolist(), strict=True)
    return [Fragment(key, *row) for key, row in rows]


def check(table: FragmentTable) -> None:
    """Fail unless the fragments cover the buffer, gaps are merged, and owners are found."""
    place, before = 0, False
    for each in fragments(table):
        gap = each.key is None
        assert each.offset == place, "fragments neither overlap nor leave bytes out"
        assert each.nbytes > 0, "no fragment is empty"
        assert not (gap and before), "gaps are merged"
        assert not gap or (each.ready_ns, each.urgency) == (0, GAP), "a gap is free"
        assert gap or table.offset(each.key) == place, "owners are found"
        place, before = place + each.nbytes, gap
    assert place == table.nbytes, "the fragments cover the buffer"
