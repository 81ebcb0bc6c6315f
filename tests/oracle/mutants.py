"""Mends of the library that can be taken out, and when the oracle finds that they are missing.

    PYTHONPATH=tests python -m oracle --device cpu --mutant NAME --seed SEED

A mutant replaces a piece of a module's text when the module is imported. The oracle must call one
of the programs from its seed on wrong, within as many programs as the list says. When the list was
made it took these numbers of programs: order of streams 1, of asynchronous calls on a GPU 1 and on
the CPU device 1, of kernels 1, facts 1, addresses 5, two entries 2, saved tensors 2, iterations 1,
states that lack tables 1, fields of records 2, identity of versions 1, versions discarded while
they are fetched 14; order of batches 2, or 3 on the driver without a GPU; one way for each block
25, on both; stores behind loads 1.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType


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


MUTANTS = [
    Mutant(
        "order of streams",
        "flashwarp.launch.launcher",
        "        if self.order is None:\n            return queue()",
        "        return queue()",
        "fake",
        "arrays",
        1,
        20,
    ),
    Mutant(
        "order of asynchronous calls on a GPU",
        "flashwarp.array.calls",
        "            if call.ordered:\n",
        "            if False:\n",
        "fake",
        "arrays,futures",
        24,
        20,
    ),
    Mutant(
        "order of asynchronous calls on the CPU device",
        "flashwarp.array.turns",
        "if not self._attachment.cache.turn._is_owned():",
        "if False:",
        "cpu",
        "arrays,futures",
        1,
        20,
    ),
    Mutant(
        "order of kernels",
        "flashwarp.launch.order",
        "        if array.order is not None:\n            queue =",
        "        if False:\n            queue =",
        "fake",
        "kernels",
        1,
        20,
    ),
    Mutant(
        "facts while a pipeline has the array",
        "flashwarp.array.array",
        "return self._turns.fact(functools.partial(explain",
        "return self._turns.act(functools.partial(explain",
        "cpu",
        "pipelines",
        1,
        20,
    ),
    Mutant(
        "addresses of tensors that are gone",
        "flashwarp.interop.torch.states",
        "self.tensors[self._known[key]] = given",
        "self.tensors[self._known[key]] = given.contiguous()",
        "cpu",
        "torches",
        1,
        20,
    ),
    Mutant(
        "two entries for one memory",
        "flashwarp.loading.into",
        "_check_same(last, each)",
        "pass",
        "cpu",
        "files",
        1,
        10,
    ),
    Mutant(
        "versions of saved tensors",
        "flashwarp.interop.torch.activations",
        "        saved.check()\n",
        "",
        "cpu",
        "torches",
        1,
        20,
    ),
    Mutant(
        "iterations that begin anew",
        "flashwarp.interop.torch.loader",
        "this.handed_out = each + 1",
        "this.handed_out = self._state[1] = each + 1",
        "cpu",
        "torches",
        1,
        20,
    ),
    Mutant(
        "states that lack tables",
        "flashwarp.interop.torch.offloading.weight",
        "if not self.left_out:",
        "if self.closed:",
        "cpu",
        "torches",
        1,
        30,
    ),
    Mutant(
        "fields of records",
        "flashwarp.checkpoint.region",
        "    if dtype.names is None:\n        return dtype.str",
        "    if True:\n        return dtype.str",
        "cpu",
        "checkpoints",
        1,
        20,
    ),
    Mutant(
        "versions discarded while they are fetched",
        "flashwarp.checkpoint.storing",
        "core.discarded_since[self] = discarded",
        "core.discarded_since[self] = set()",
        "cpu",
        "checkpoints",
        1,
        80,
    ),
    Mutant(
        "identity of versions that a reader knows",
        "flashwarp.checkpoint.system",
        "known.identity != identity",
        "known.regions != known.regions",
        "cpu",
        "checkpoints",
        1,
        40,
    ),
]


NATIVE = [
    Mutant(
        "order of batches",
        "native/pipeline/batch_engine.cpp",
        "  if (writes) {\n    overlaps =",
        "  if (false) {\n    overlaps =",
        "cpu",
        "pipelines",
        1,
        10,
    ),
    Mutant(
        "one way for each block",
        "native/storage/block_locks.h",
        "  bool take() {\n",
        "  void release() {}\n  bool take() { return true; }\n  bool taken() {\n",
        "cpu",
        "arrays,pipelines",
        1,
        100,
    ),
    Mutant(
        "stores behind loads",
        "native/cuda/order.cpp",
        "(access.stores || made.stores) && !same_work",
        "made.stores && !same_work",
        "fake",
        "arrays,futures",
        1,
        10,
    ),
]
"""Mends of the extension: to be changed by hand, and built. `module` is the file. Of the second one
the old `release` has to go, too."""


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
