"""Dealing rows over another number of ranks: what moves, and what a killed rank leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from distributed import programs
from distributed.pool import Pool
from support.samples import sample

SHAPE = (101, 3)  # of int32
ROW_BYTES = 12
KILLS = int(os.environ.get("FLASHWARP_RESHARD_KILLS", "12"))
SEED = int(os.environ.get("FLASHWARP_RESHARD_SEED", "1"))

PAIRS = [
    (before, after, deal, shared)
    for before in (1, 2, 3, 4)
    for after in (1, 2, 3, 4)
    for deal in ("range", "hash")
    for shared in (True, False)
]


@pytest.mark.parametrize(("before", "after", "deal", "shared"), sample(PAIRS, 7))
def test_rows_are_the_same_on_another_number_of_ranks(
    pool: Any, tmp_path: Path, before: int, after: int, deal: str, shared: bool
) -> None:
    pool.run(before, programs.fill, tmp_path, deal, SHAPE, shared)

    # In one folder the new ranks do it alone.
    moved = pool.run(
        after if shared else max(before, after), programs.deal_anew, tmp_path, shared, after
    )

    names = pool.run(after, programs.check, tmp_path, SHAPE, shared, "r")
    assert len(names[0]) == (after if shared else 1) + 1
    whole = SHAPE[0] * ROW_BYTES
    assert sum(each["read"] for each in moved) == whole
    starts = [SHAPE[0] * rank // after * ROW_BYTES for rank in range(after + 1)]
    assert [each["written"] for each in moved[:after]] == np.diff(starts).tolist()
    if shared:
        assert all(each["read"] == each["written"] for each in moved)
    else:
        starts = [SHAPE[0] * rank // before * ROW_BYTES for rank in range(before + 1)]
        assert [each["read"] for each in moved[:before]] == np.diff(starts).tolist()


def test_bad_input_is_the_same_error_on_all(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, programs.bad_reshards, tmp_path)

    assert found[0] == found[1] == found[2]
    assert [kind.removesuffix("Error") for kind, _ in found[0]] == [
        *("MissingFile", "Locked", "Argument", "Argument", "Argument"),
        *("MissingFile", "Argument", "ExistingFile"),
    ]
    assert "no rank sees shard 0" in found[0][5][1]
    assert "the array has 1 shards, and the group 3 ranks" in found[0][6][1]


def kill(
    pool: Any, folder: Path, before: int, after: int, deal: str, shared: bool, *when: Any
) -> int:
    """Deal rows anew with a rank that is killed; return how many shards there are then."""
    count = max(before, after)
    pool.run(before, programs.fill, folder, deal, SHAPE, shared)
    doomed, rank = Pool(folder, count), when[0]
    try:
        doomed.start(count, programs.until_killed_while_dealing, folder, shared, after, *when)
        for each in set(range(count)) - {rank}:
            doomed.result(each)
        doomed.processes[rank].join(0.2)  # it may have got through
    finally:
        doomed.close()
    first = programs.home(folder, 0, shared)

    ranks = json.loads((first / "sharded.json").read_text())["ranks"]

    pool.run(ranks, programs.check, folder, SHAPE, shared, "r")
    names = pool.run(ranks, programs.check, folder, SHAPE, shared, "r+")
    # The writer has removed what was left.
    assert all(len([n for n in each if n.startswith("sh")]) <= ranks + 1 for each in names)
    pool.run(count, programs.deal_anew, folder, shared, after)
    pool.run(after, programs.check, folder, SHAPE, shared, "r")
    return ranks


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_rank_leaves_the_old_array_or_the_new_one(
    pool: Any, tmp_path: Path, number: int
) -> None:
    draw = np.random.default_rng([SEED, number])
    before, after = (int(each) for each in draw.permutation([1, 2, 3])[:2])
    deal, shared = str(draw.choice(["range", "hash"])), bool(draw.random() < 0.4)
    # A rank that deals anew makes 14 to 21 operations on files.
    rank, at = int(draw.integers(max(before, after))), int(draw.integers(1, 22))

    assert kill(pool, tmp_path, before, after, deal, shared, rank, at) in (before, after)


@pytest.mark.parametrize(
    ("rank", "rename", "ranks"), [(0, 2, 2), (1, 2, 2), (0, 3, 2), (1, 3, 3), (2, 3, 3)]
)
def test_the_rename_of_rank_0_commits_for_all(
    pool: Any, tmp_path: Path, rank: int, rename: int, ranks: int
) -> None:
    # Each rank gives names to a shard, to what is prepared, and to its manifest, in this order.
    found = kill(pool, tmp_path, 2, 3, "hash", False, rank, rename, ("os.rename",))

    assert found == ranks
