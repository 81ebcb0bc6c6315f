"""What a check of `flashwarp doctor` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "limited", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    state : {"ok", "limited", "missing", "broken"}
        `missing` is a choice (no GPU), `broken` keeps flashwarp from working at all.
    detail : str
        What was found.
    advice : str
        What to do about it; empty if nothing needs to be done.
    values : dict
        The figures, for programs.
    name : str
        What was checked; `examine` fills it in.
    """

    state: State
    detail: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    name: str = ""
