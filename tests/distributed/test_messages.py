"""Messages of sharded arrays: of a fixed capacity, and by the communicator of GPUs, over gloo."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
import torch.distributed as dist

from distributed import messages
from flashwarp.distributed import communicator


@pytest.mark.parametrize(
    ("ranks", "deal", "rows"), [(1, "range", 9), (2, "hash", 50), (3, "range", 2), (3, "hash", 0)]
)
def test_a_capacity_gives_the_rows_that_fit_and_zeros(
    pool: Any, tmp_path: Path, ranks: int, deal: str, rows: int
) -> None:
    pool.run(ranks, messages.rows_with_a_capacity, tmp_path, deal, rows)


def test_several_tables_take_a_capacity(pool: Any, tmp_path: Path) -> None:
    pool.run(3, messages.tables_with_a_capacity, tmp_path)


def test_what_a_capacity_hides_the_next_call_raises_on_all(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, messages.bad_capacities, tmp_path)

    assert [each[:-1] for each in found] == [found[0][:-1]] * 3
    assert [kind for kind, _ in found[0]] == [*["ArgumentError"] * 3, *["BoundsError"] * 5]
    texts = [text for _, text in found[0]]
    assert "capacity 1 (ranks [0, 2])" in texts[1]
    assert "rank 1: index 20 is out of bounds for an axis of length 20" in texts[4]
    assert "index -21 is out of bounds" in texts[5]
    assert "2 rows found no room in messages: give a capacity that is larger by 2" in texts[5]


def test_rows_go_by_one_communicator_for_all_arrays(pool: Any, tmp_path: Path) -> None:
    pool.run(3, messages.rows_by_a_communicator, tmp_path)


def test_in_a_capture_no_message_goes_over_the_host(pool: Any, tmp_path: Path) -> None:
    pool.run(3, messages.gathers_in_a_capture, tmp_path)


def test_threads_of_nccl_are_told_not_to_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []

    class Group:
        Options = SimpleNamespace

        def __init__(self, _: Any, rank: int, count: int, options: Any) -> None:
            seen.append((os.environ[name], rank, count, options.global_ranks_in_group))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    party = SimpleNamespace(members=[4, 7], rank=1, count=2, number=3, store=dist.HashStore())
    for before in ("3", None):
        monkeypatch.delenv(name, raising=False)
        if before:
            monkeypatch.setenv(name, before)
        communicator._backend(party, torch.device("cuda", 0), 2.0)
        assert os.environ.get(name) == before
    assert seen == [("0", 1, 2, [4, 7])] * 2


def test_two_ranks_do_not_share_a_gpu(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, messages.one_gpu_for_two, tmp_path)

    assert found == [found[0]] * 3
    assert found[0][0] == "ArgumentError"
    assert "ranks 1 and 2 use one GPU, GPU-7" in found[0][1]


@pytest.mark.parametrize("hurried", [False, True], ids=["time limit", "a rank is lost"])
def test_a_message_that_does_not_end_is_aborted(pool: Any, tmp_path: Path, hurried: bool) -> None:
    found = pool.run(3, messages.stuck, tmp_path, hurried)

    for waited, kinds in found:
        assert set(kinds) == {"RankLostError"}
        assert waited < 20
    assert found[0][0] > 0.5
    pool.run(3, messages.meets_anew, tmp_path)


def test_what_gpus_refuse_is_the_same_error_on_all(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, messages.bad_gpus, tmp_path)

    assert found == [found[0]] * 3
    kinds = [kind.removesuffix("Error") for kind, _ in found[0]]
    assert kinds == ["Capture", "Device", "Argument", "Dtype", "Argument"]
    texts = [text for _, text in found[0]]
    assert "give gather capacity=" in texts[0]
    assert "need a torch that has CUDA and NCCL" in texts[1]
    assert "on cuda (ranks [1])" in texts[2]
    assert "rows are on meta" in texts[4]
