"""Changes of sources as text: what mutants replace, and where they show.

A file says in its first lines what it is about, and then has a piece for each change:

    == NAME: WORD... KEY=VALUE...
    a line that says more
    -a line of the passage, which occurs exactly once in its source
    +a line that takes its place
     a line of both
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Passage:
    """One change: its name, the words and options behind it, the line that follows, and texts."""

    name: str
    words: list[str]
    options: dict[str, str]
    line: str
    old: str
    new: str


def read(path: Path) -> tuple[str, Iterator[Passage]]:
    """Return what a file is about, and its changes."""
    head, *pieces = re.split(r"^== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return head, map(_passage, pieces)


def _passage(piece: str) -> Passage:
    first, line, *lines = piece.rstrip("\n").splitlines()
    name, _, rest = first.partition(": ")
    words = [word for word in rest.split() if "=" not in word]
    options = dict(word.split("=") for word in rest.split() if "=" in word)
    old, new = ("\n".join(each[1:] for each in lines if each[:1] != but) for but in "+-")
    return Passage(name, words, options, line, old, new)
