"""What was found of versions, and which of them to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashwarp.config import SIZE_MAX, integer


@dataclass(frozen=True)
class Finding:
    """What was found of a version.

    Attributes
    ----------
    version : int
        Its number.
    nbytes : int
        Bytes of its regions; 0 if its manifest cannot be read.
    problem : str
        Why it cannot be used; empty if it can.
    """

    version: int
    nbytes: int
    problem: str


def superfluous(
    versions: Sequence[int],
    is_usable: Callable[[int], bool],
    keep_last: int,
    keep_every: int | None = None,
) -> list[int]:
    """Return the versions that may go, ascending.

    Versions that are not `is_usable` do not count as kept, else pruning could leave damaged ones
    alone; it is asked of the newest, until enough are kept.
    """
    keep_last = integer("keep_last", keep_last, 1, SIZE_MAX)
    if keep_every is not None:
        keep_every = integer("keep_every", keep_every, 1, SIZE_MAX)
    kept = 0
    end = len(versions)
    while end > 0 and kept < keep_last:
        end -= 1
        kept += is_usable(versions[end])
    return [v for v in versions[:end] if keep_every is None or v % keep_every]
