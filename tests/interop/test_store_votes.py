"""Ranks without a common folder commit a version by all, or by none, through a store of torch."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is an extra")

import torch.distributed as dist

import flashwarp.torch
from checkpoint.faults import Faults, FaultyDirectory
from checkpoint.rank_processes import WAIT_S, Ranks, content
from flashwarp.checkpoint import system
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.errors import ArgumentError, CheckpointError, PathError, RankError

Tell = Callable[[Any], None]


def opened(store: Any, folder: Path, rank: int, ranks: int, **config: Any) -> Checkpointer:
    number = config.pop("number", 0)
    votes = flashwarp.torch.StoreVotes(store, number)
    config = {"ranks": ranks, "timeout_s": 30, "retry_s": 0.05, "votes": votes, **config}
    return Checkpointer(folder / str(rank), "cpu", "256 KiB", "1 MiB", rank=rank, config=config)


def opened_all(store: Any, folder: Path, ranks: int, **config: Any) -> list[Checkpointer]:
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(opened, store, folder, rank, ranks, **config) for rank in range(ranks)]
        return [each.result(WAIT_S) for each in made]


def write(checkpointer: Checkpointer, rank: int, version: int) -> Any:
    checkpointer.protect("state", content(rank, version))
    return checkpointer.checkpoint(version)


def assert_holds(checkpointer: Checkpointer, rank: int, versions: list[int]) -> None:
    assert checkpointer.versions() == versions
    for version in versions:
        state = np.zeros_like(content(rank, version))
        checkpointer.restart(version, into={"state": state})
        np.testing.assert_array_equal(state, content(rank, version))


def work(rank: int, folder: Path, tell: Tell, port: int, ranks: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with opened(store, folder, rank, ranks) as checkpointer:
        saved = [write(checkpointer, rank, version) for version in range(5)]
        tell([each.result(WAIT_S) for each in saved])
    with opened(store, folder, rank, ranks, number=1) as checkpointer:
        assert_holds(checkpointer, rank, list(range(5)))
    tell("read")


def test_processes_without_a_common_folder_commit_versions(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    with Ranks(2, work, tmp_path, store.port, 2) as ranks:
        assert list(ranks.heard(2).values()) == [list(range(5))] * 2
        assert list(ranks.heard(2).values()) == ["read"] * 2


def die(rank: int, folder: Path, tell: Tell, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # On a busy machine, one rank has imported torch long before the other.
    store.set(f"here {rank}", "")
    store.wait(["here 0", "here 1"], timedelta(seconds=WAIT_S))
    checkpointer = opened(store, folder, rank, 2, timeout_s=2.0)
    write(checkpointer, rank, 0).result(WAIT_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 failed: has not written it within 2 s"):
        write(checkpointer, rank, 1).result(WAIT_S)
    assert checkpointer.versions() == [0, 1]  # the second is in the caches alone
    checkpointer.close(drain=False)
    tell(1)


def test_a_rank_that_dies_fails_the_others_after_the_time_limit(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    with Ranks(2, die, tmp_path, store.port) as ranks:
        assert ranks.heard(1) == {0: 1}

    again = opened_all(dist.HashStore(), tmp_path, 2)
    for rank, checkpointer in enumerate(again):
        assert_holds(checkpointer, rank, [0])
        checkpointer.close()


def test_a_failure_of_one_rank_is_raised_on_all_within_5_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {rank: Faults() for rank in range(2)}

    class FaultyOfRank(FaultyDirectory):
        def __init__(self, path: Any, rank: int, **options: Any) -> None:
            super().__init__(path, rank, **options)
            self.faults = faults[rank]

    monkeypatch.setattr(system, "Directory", FaultyOfRank)
    both = opened_all(dist.HashStore(), tmp_path, 2)
    faults[1].write_error = PathError(errno.ENOSPC, "full", "folder")

    began = time.monotonic()
    saved = [write(each, rank, 7) for rank, each in enumerate(both)]
    with pytest.raises(RankError, match="rank 1 failed") as caught:
        saved[0].result(WAIT_S)
    with pytest.raises(PathError):
        saved[1].result(WAIT_S)
    assert time.monotonic() - began < 5
    assert caught.value.rank == 1

    faults[1].write_error = None
    for each in both:
        each.close()  # tries again: what both have in their caches is committed
    again = opened_all(dist.HashStore(), tmp_path, 2)
    for rank, each in enumerate(again):
        assert_holds(each, rank, [7])
        each.close()


def test_a_version_that_one_rank_has_lost_is_no_version(tmp_path: Path) -> None:
    store = dist.HashStore()
    both = opened_all(store, tmp_path, 2)
    for version in range(3):
        for rank, each in enumerate(both):
            write(each, rank, version)
    for each in both:
        each.close()
    with Checkpointer(tmp_path / "1", "cpu", 0, 0, rank=1) as alone:
        alone.discard(1)

    again = opened_all(store, tmp_path, 2, number=1)

    for rank, each in enumerate(again):
        assert_holds(each, rank, [0, 2])
        each.close()


def test_a_version_without_a_record_on_this_rank_is_complete_if_another_has_it(
    tmp_path: Path,
) -> None:
    # A rank that was killed between the last vote and its own record.
    both = opened_all(dist.HashStore(), tmp_path, 2)
    for rank, each in enumerate(both):
        write(each, rank, 0)
    for each in both:
        each.close()
    (tmp_path / "1" / "default" / "ranks" / "complete" / f"{0:019d}").unlink()

    again = opened_all(dist.HashStore(), tmp_path, 2)

    for rank, each in enumerate(again):
        assert_holds(each, rank, [0])
        each.close()


def test_versions_are_discarded_and_written_again(tmp_path: Path) -> None:
    both = opened_all(dist.HashStore(), tmp_path, 2)
    for _ in range(3):
        saved = [write(each, rank, 0) for rank, each in enumerate(both)]
        assert [each.result(WAIT_S) for each in saved] == [0, 0]
        for each in both:
            each.discard(0)
            assert each.versions() == []
    for each in both:
        each.close()


def test_bad_votes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"is no torch\.distributed\.Store"):
        flashwarp.torch.StoreVotes({})
    with pytest.raises(ArgumentError, match=r"is no flashwarp\.torch\.StoreVotes"):
        Checkpointer(tmp_path, "cpu", 0, 0, config={"votes": 1})
    votes = flashwarp.torch.StoreVotes(dist.HashStore())
    with pytest.raises(ArgumentError, match="for ranks that write"):
        Checkpointer(tmp_path, "cpu", 0, 0, config={"votes": votes, "read_only": True})
    with Checkpointer(tmp_path, "cpu", 0, 0, config={"votes": votes}):
        pass
    with pytest.raises(ArgumentError, match="of another checkpointer"):
        Checkpointer(tmp_path, "cpu", 0, 0, config={"votes": votes})


def test_ranks_that_disagree_or_stay_away_are_found(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 has not opened its checkpointer within 0\.2 s"):
        opened(dist.HashStore(), tmp_path, 0, 2, timeout_s=0.2)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(opened, store, tmp_path, 0, 2)
        with pytest.raises(CheckpointError, match="was opened with ranks="):
            opened(store, tmp_path, 1, 3, timeout_s=0.5)
        with pytest.raises((CheckpointError, RankError)):
            first.result(WAIT_S).close()
    with pytest.raises(ArgumentError, match="has voted in this store before"):
        opened(store, tmp_path, 1, 2)
