"""What was found of versions, and which of them to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashwarp.config import SIZE_MAX, integer

__all__ = ["Finding", "superfluous"]


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
    findings: Iterable[Finding], keep_last: int, keep_every: int | None = None
) -> list[int]:
    """Return the versions that may go, the oldest first.

    Parameters
    ----------
    findings : iterable of Finding
        All versions, the newest first.
    keep_last : int
        Keep so many of the newest versions that can be used, at least one. A damaged version does
        not count: otherwise pruning could leave damaged ones only.
    keep_every : int, optional
        Also keep every version whose number is a multiple of it.
    """
    keep_last = integer("keep_last", keep_last, 1, SIZE_MAX)
    if keep_every is not None:
        keep_every = integer("keep_every", keep_every, 1, SIZE_MAX)
    kept = 0
    gone = []
    for found in findings:
        if kept == keep_last and (keep_every is None or found.version % keep_every):
            gone.append(found.version)
        elif not found.problem and kept < keep_last:
            kept += 1
    return gone[::-1]
