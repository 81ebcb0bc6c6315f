"""Mends of the library that can be taken out: `mends.txt`, as `support.passages` reads it.

    PYTHONPATH=tests python -m oracle --device cpu --mutant NAME --seed SEED

A mutant replaces a piece of a module's text when the module is imported. The oracle must call one
of the programs from its seed on wrong, within as many programs as the list says.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from support.passages import read


@dataclass(frozen=True)
class Mutant:
    """A mend that is taken out.

    Attributes
    ----------
    name : str
    module : str
        The module that has the mend.
    old, new : str
        A piece of its text, which occurs once, and what is there without the mend.
    device, rooms : str
        Where the oracle looks.
    seed, programs : int
        The first program, and how many there are until one is wrong, with some to spare.
    """

    name: str
    module: str
    old: str
    new: str
    device: str
    rooms: str
    seed: int
    programs: int


def _all() -> Iterator[Mutant]:
    _, passages = read(Path(__file__).with_name("mends.txt"))
    for each in passages:
        device, rooms = each.words
        numbers = {key: int(value) for key, value in each.options.items()}
        yield Mutant(each.name, each.line, each.old, each.new, device, rooms, **numbers)


MUTANTS, NATIVE = [], []
for _each in _all():
    (NATIVE if _each.module.startswith("native/") else MUTANTS).append(_each)
"""Of modules, and of the extension, whose `module` is a file."""


def named(name: str) -> Mutant:
    """Return a mutant of the list."""
    for each in MUTANTS:
        if each.name == name:
            return each
    if any(each.name == name for each in NATIVE):
        raise SystemExit(f"{name!r} is a mend of the extension: take it out, and build")
    raise SystemExit(f"no mutant {name!r}: there are {[each.name for each in MUTANTS]}")


def take_out(name: str) -> None:
    """Let this process import the library without a mend; the empty name leaves it whole."""
    if name:
        assert "flashwarp" not in sys.modules, "the library has been imported"
        sys.meta_path.insert(0, _Finder(named(name)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(name, spec.origin)
        loader.mutant = self._mutant
        return importlib.util.spec_from_file_location(name, spec.origin, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> object:
        with open(self.path, encoding="utf-8") as file:
            text = file.read()
        assert text.count(self.mutant.old) == 1, f"{self.mutant.name}: its text has changed"
        return compile(text.replace(self.mutant.old, self.mutant.new), self.path, "exec")
