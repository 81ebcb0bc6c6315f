"""Sharded arrays on two to four ranks: rows, dealing, bad input, and ranks that are lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from distributed import programs
from distributed.pool import Pool
from distributed.programs import RECORD
from flashwarp.distributed import ShardedArray, reshard
from flashwarp.errors import ArgumentError
from support.samples import sample

ROWS = [
    (ranks, deal, dtype, shape, shared)
    for ranks in (1, 2, 3, 4)
    for deal in ("range", "hash")
    for dtype, shape in (
        ("f4", (1000, 3)),
        ("i8", (3,)),
        (RECORD, (50,)),
        ("S3", (9, 2, 2)),
        ("u1", (5, 0)),
        ("c16", (1, 4)),
    )
    for shared in (True, False)
]


@pytest.mark.parametrize(("ranks", "deal", "dtype", "shape", "shared"), sample(ROWS, 8))
def test_every_rank_reads_all_rows(
    pool: Any, tmp_path: Path, ranks: int, deal: str, dtype: Any, shape: Any, shared: bool
) -> None:
    found = pool.run(
        ranks, programs.rows_of_all_ranks, tmp_path, deal, np.dtype(dtype), shape, shared
    )

    assert sum(found) == shape[0]


def test_tensors_come_back_for_tensors(pool: Any, tmp_path: Path) -> None:
    pool.run(3, programs.tensors, tmp_path)


@pytest.mark.parametrize("deal", ["range", "hash"])
def test_of_a_row_that_repeats_the_last_of_the_highest_rank_stays(
    pool: Any, tmp_path: Path, deal: str
) -> None:
    pool.run(4, programs.who_wins, tmp_path, deal)


def test_several_tables_take_one_message_more_than_one(pool: Any, tmp_path: Path) -> None:
    pool.run(3, programs.several_tables, tmp_path)


def test_bad_input_of_one_rank_is_the_same_error_on_all(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, programs.bad_calls, tmp_path)

    assert found[0] == found[1] == found[2]
    assert [kind.removesuffix("Error") for kind, _ in found[0]] == [
        *("Bounds", "Bounds", "IndexDtype", "IndexDtype", "Argument", "IndexDtype"),
        *("Bounds", "Argument", "Argument", "Argument"),
        *("Bounds", "Argument", "Argument", "Argument", "Argument", "Locked"),
        *("Closed", "ReadOnly", "Argument"),
        *("ExistingFile", "Argument", "Argument", "Argument", "Argument", "Dtype", "Argument"),
        *("Argument", "Argument", "MissingFile", "Argument", "Cache"),
    ]
    texts = [text for _, text in found[0]]
    assert texts[0] == "rank 1: index 20 is out of bounds for an axis of length 20"
    assert "flush" in texts[13]
    assert "(ranks [0, 2]), " in texts[13]
    (different,) = (text for text in texts if "(20, 3)" in text)
    assert "(20, 2)" in different


def test_shards_that_are_not_those_of_the_save_are_refused(pool: Any, tmp_path: Path) -> None:
    found = pool.run(2, programs.bad_files, tmp_path)

    assert found[0] == found[1]
    kinds = {name: kind for name, (kind, _) in found[0].items()}
    assert kinds.pop("missing") == "MissingFileError"
    assert set(kinds.values()) == {"FileFormatError"}
    texts = {name: text for name, (_, text) in found[0].items()}
    for name in ("replaced", "of another save"):
        assert "it was replaced, or is of another save" in texts[name]
    assert "a mix of saves: rank 0 has save" in texts["mix"]


def test_a_group_that_is_destroyed_is_named_on_all_ranks(pool: Any, tmp_path: Path) -> None:
    found = pool.run(4, programs.destroyed, tmp_path)

    assert found == [found[0]] * 4
    assert {kind for kind, _ in found[0]} == {"ClosedError"}
    assert "rank 1: " in found[0][2][1]


def test_an_array_is_of_its_process_and_ends_once(pool: Any, tmp_path: Path) -> None:
    pool.run(2, programs.alone, tmp_path)


def test_a_program_without_ranks_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="init_process_group first"):
        ShardedArray.open(tmp_path)
    with pytest.raises(ArgumentError, match="init_process_group first"):
        reshard(tmp_path)


# Ranks that are lost.


def test_a_rank_that_leaves_a_call_is_lost_to_the_others(pool: Any, tmp_path: Path) -> None:
    assert pool.run(3, programs.leaves, tmp_path) == ["RankLostError", "", "RankLostError"]


def test_a_rank_that_never_comes_is_lost_after_the_time_limit(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, programs.never_comes, tmp_path)

    assert {kind for kind, _ in found} == {"RankLostError"}
    assert "did not come within 2 s" in found[0][1]


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_ranks_meet_again_after_one_has_stayed_away(pool: Any, tmp_path: Path, absent: int) -> None:
    found = pool.run(3, programs.comes_to_the_next, tmp_path, absent)

    assert found == [[1, 2, 3, 0]] * 3


def test_a_rank_that_never_opens_is_lost_after_the_time_limit(pool: Any, tmp_path: Path) -> None:
    assert pool.run(2, programs.never_opens, tmp_path) == ["RankLostError", ""]


@pytest.mark.parametrize(("shared", "connected"), [(True, False), (False, False), (False, True)])
def test_a_rank_that_is_killed_loses_nothing_that_was_flushed(
    pool: Any, tmp_path: Path, shared: bool, connected: bool
) -> None:
    doomed = Pool(tmp_path, 3)
    try:
        doomed.start(3, programs.until_killed, tmp_path, shared, connected)
        while not (tmp_path / "flushed-1").exists():
            time.sleep(0.01)
        time.sleep(float(np.random.default_rng().random()) * 0.2)
        os.kill(doomed.processes[1].pid, signal.SIGKILL)

        assert all("another rank has ended" in doomed.result(rank) for rank in (0, 2))
    finally:
        doomed.close()

    flushed = max(int((tmp_path / f"flushed-{rank}").read_text() or 0) for rank in range(3))
    rows = pool.run(3, programs.all_rows, tmp_path, shared)
    assert all((each == rows[0]).all() for each in rows)
    assert rows[0].min() >= flushed
    assert rows[0].max() <= flushed + 2
