"""An array dealt over ranks, which are processes; only programs that are asked for it have it.

All ranks call together, each with ids of its own; rows are dealt over other numbers of ranks.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashwarp.errors import BoundsError
from oracle.model import Rows
from oracle.steps import step
from oracle.world import KINDS, Hand, Held

_pools: list[Any] = []  # started by the first program that needs it
_opened: dict[str, Any] = {}  # in the process of a rank


@dataclass
class Dealt:
    """An array that all ranks have open."""

    held: Held
    folder: Path
    deal: str
    shared: bool
    ranks: int
    every: Any = field(repr=False, default=None)

    def run(self, act: Any, *arguments: Any) -> list[Any]:
        """Call a function on all ranks."""
        return self.every.run(self.ranks, act, self.folder, *arguments)

    def close(self) -> None:
        """Close it on all ranks, and remove its files."""
        self.run(_close)
        shutil.rmtree(self.folder)


# In the processes of the ranks.


def _open(rank: int, group: Any, folder: Path, shared: bool, *made: Any) -> None:
    from distributed import programs

    path = programs.home(folder, rank, shared)
    how = {"cache": "16 KiB", "line": 512}
    found = programs.create(group, path, *made, **how) if made else None
    _opened[str(folder)] = found or programs.reopen(group, path, **how)


def _call(rank: int, group: Any, folder: Path, name: str, *arguments: Any) -> Any:
    return getattr(_opened[str(folder)], name)(*(each[rank] for each in arguments))


def _gather(rank: int, group: Any, folder: Path, ids: Any) -> tuple[Any, bytes]:
    # As bytes: a pickle changes the byte order of a dtype.
    found = _opened[str(folder)].gather(ids[rank])
    assert found.dtype == _opened[str(folder)].dtype
    return found.shape, found.tobytes()


def _stray(rank: int, group: Any, folder: Path, stray: int) -> None:
    array = _opened[str(folder)]
    rows = array.gather([0, 0])
    try:
        array.scatter([0, array.shape[0] if rank == stray else 0], rows)
    except BoundsError:
        return
    raise AssertionError(f"rank {rank} has stored rows beside a stray one")


def _close(rank: int, group: Any, folder: Path) -> None:
    _opened.pop(str(folder)).close()


def _deal(rank: int, group: Any, folder: Path, shared: bool, ranks: int) -> None:
    from distributed import programs

    path = programs.home(folder, rank, shared)
    programs.reshard(path, ranks, group=group, timeout_s=programs.TIMEOUT_S)


# Steps.


def _of(hand: Hand) -> Dealt:
    found = hand.world.extras.get("shards")
    if found is not None:
        return found
    if not _pools:
        from distributed.pool import Pool

        _pools.append(Pool(hand.world.folders["memory"]))
    dtype, row_shape = hand.random.choice(KINDS)
    count = hand.random.choice((1, 3, 17, 150))
    model = Rows("shards", np.zeros((count, *row_shape), dtype))
    held = Held("shards", model, lambda: None, lambda: b"")
    folder = hand.world.folders["memory"] / "shards"
    deal, shared = hand.random.choice(("range", "hash")), hand.odds(0.5)
    dealt = Dealt(held, folder, deal, shared, hand.random.randint(1, 4), _pools[0])
    hand.say(f"{count} rows of {np.dtype(dtype)}{row_shape} by {deal} on {dealt.ranks} ranks")
    dealt.run(_open, shared, model.now.dtype, model.now.shape, deal)
    hand.world.extras["shards"] = dealt
    hand.world.closing.append(dealt)
    return dealt


def _ids(hand: Hand, dealt: Dealt) -> list[Any]:
    """Choose rows for each rank, which may be none, and may be those of another rank."""
    return [hand.ids(dealt.held, repeats=True)[hand.odds(0.2) :] for _ in range(dealt.ranks)]


@step(6, alone=True)
def gather_shards(hand: Hand) -> None:
    """Read on all ranks."""
    dealt = _of(hand)
    ids = _ids(hand, dealt)
    hand.say(f"gather({', '.join('{}' for _ in ids)})", *ids)
    reads = [dealt.held.model.read(each) for each in ids]
    for read, (shape, content) in zip(reads, dealt.run(_gather, ids), strict=True):
        hand.check(dealt.held, read, np.frombuffer(content, dealt.held.dtype).reshape(shape))


@step(6, alone=True)
def scatter_shards(hand: Hand) -> None:
    """Store on all ranks; the highest rank wins."""
    dealt = _of(hand)
    ids = _ids(hand, dealt)
    values = [hand.values(dealt.held, len(each)) for each in ids]
    line = hand.say(f"scatter({', '.join('{}' for _ in ids)})", *ids)
    dealt.run(_call, "scatter", ids, values)
    for rows, stored in zip(ids, values, strict=True):
        hand.stores(dealt.held, line, rows, stored)


@step(1, alone=True)
def stray_from_shards(hand: Hand) -> None:
    """Store out of bounds on one rank: all fail, and nothing is stored."""
    dealt = _of(hand)
    stray = hand.random.randrange(dealt.ranks)
    hand.say(f"scatter([0, {{}}]) on rank {stray}", dealt.held.count)
    dealt.run(_stray, stray)


@step(2, alone=True)
def open_shards_again(hand: Hand) -> None:
    """Flush, or close and open, perhaps on another number of ranks."""
    dealt = _of(hand)
    if hand.odds(0.4):
        hand.say("flush()")
        dealt.run(_call, "flush")
        return
    before, ranks = dealt.ranks, hand.random.randint(1, 4)
    hand.say(f"close(), reshard({ranks}), open()")
    dealt.run(_close)
    dealt.ranks = ranks if dealt.shared else max(before, ranks)
    dealt.run(_deal, dealt.shared, ranks)
    dealt.ranks = ranks
    dealt.run(_open, dealt.shared)
