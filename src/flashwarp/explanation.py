"""How bytes travel, and why, for people: what `explain` of arrays and others returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashwarp._names import renamed

__all__ = ["Explanation"]


@renamed
@dataclass(frozen=True)
class Explanation:
    """How bytes travel, and why; `str` gives a text for people.

    `explain` of arrays, pipelines and checkpointers returns one.
    """

    route: str
    """Of an array, "in_place", "bounce" or "direct", or "shared" for a client of a shared cache."""
    reason: str
    facts: Mapping[str, Any]
    """By name: texts, numbers, mappings, and tuples of these, whose members are listed."""
    advice: tuple[str, ...] = ()
    """What the counters advise. Empty if there is nothing to change, or if little was read yet."""

    def __str__(self) -> str:
        told = {"route": f"{self.route}: {self.reason}", **self.facts, "advice": self.advice}
        width = max(11, *map(len, told))
        return "\n".join(
            f"{name:<{width}} {_text(each)}"
            for name, fact in told.items()
            for each in (fact if isinstance(fact, tuple) else (fact,))
            if each != ""
        )


def _text(fact: object) -> str:
    if isinstance(fact, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in fact.items())
    return str(fact)
