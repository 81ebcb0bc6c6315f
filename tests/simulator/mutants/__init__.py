"""Deliberate mistakes in the device headers, in a file for each header, named as the header.

A mutant replaces one passage of one header, in a copy; the headers themselves carry no switches. A
passage that has changed since makes its mutant fail to apply, which is an error and never a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from simulator.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]


def _all() -> Iterator[Mutant]:
    here = Path(__file__).parent
    for path in sorted(each for each in here.rglob("*.py") if each.name != "__init__.py"):
        parts = path.relative_to(here).with_suffix("").parts
        module = import_module(".".join((__name__, *parts)))
        for mutant in module.MUTANTS:
            yield replace(mutant, header=module.HEADER)


MUTANTS = {mutant.name: mutant for mutant in _all()}
"""By name."""
