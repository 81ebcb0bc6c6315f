"""Deliberate mistakes in the device headers, in a file for each header, named as the header.

The file says which header it is of, and then has the mutants, as `support.passages` reads them: the
scenario, `mode=weak width=4` and the like, and in a sentence what goes wrong. The headers
themselves carry no switches: a mutant changes a copy. A passage that has changed since makes its
mutant fail to apply, which is an error and never a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.passages import read

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One mistake, and where it shows.

    Attributes
    ----------
    name : str
        What `--mutant` calls it.
    header : str
        As it is included: ``flashwarp/cache/...``, or ``benchmarks/...``.
    old, new : str
        The passage, which occurs exactly once, and what takes its place.
    why : str
        What goes wrong, in a sentence.
    scenario, mode, width, strategy, policy
        Where the simulator finds it.
    """

    name: str
    header: str
    old: str
    new: str
    why: str
    scenario: str
    mode: str = "sc"
    width: int = 1
    strategy: str = "any"
    policy: str = "clock"


def _mutants_of(path: Path) -> Iterator[Mutant]:
    head, passages = read(path)
    (header,) = re.findall("`(.+)`", head)
    for each in passages:
        (scenario,) = each.words
        options: dict[str, Any] = {**each.options, "width": int(each.options.get("width", 1))}
        yield Mutant(each.name, header, each.old, each.new, each.line, scenario, **options)


MUTANTS = {
    mutant.name: mutant
    for path in sorted(Path(__file__).parent.rglob("*.txt"))
    for mutant in _mutants_of(path)
}
"""By name."""
