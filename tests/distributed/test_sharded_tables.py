"""Sharded tables: lookups, training as one process, other numbers of ranks, and misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from distributed import training
from support.samples import sample

TRAINED = [
    (optimizer, deal, first, then)
    for optimizer in training.OPTIMIZERS
    for deal in ("range", "hash")
    for first, then in ((1, 2), (4, 3), (2, 4), (3, 1))
]


@pytest.mark.parametrize(("optimizer", "deal", "first", "then"), sample(TRAINED, 4))
def test_training_gives_the_bits_of_one_process(
    pool: Any, tmp_path: Path, optimizer: str, deal: str, first: int, then: int
) -> None:
    pool.run_with_groups(training.trains_as_one_process, tmp_path, optimizer, deal, first, then)


def test_lookups_are_those_of_torch(pool: Any, tmp_path: Path) -> None:
    pool.run(3, training.looks_up_as_torch, tmp_path)


def test_compiled_models_call_it(pool: Any, tmp_path: Path) -> None:
    pool.run(1, training.is_called_by_compiled_models, tmp_path)


def test_padding_gets_no_gradient(pool: Any, tmp_path: Path) -> None:
    pool.run(2, training.keeps_padding, tmp_path)


def test_dropped_gradients_reach_no_rank(pool: Any, tmp_path: Path) -> None:
    pool.run(3, training.drops_gradients, tmp_path)


def test_a_step_that_all_ranks_refuse_can_be_made_again(pool: Any, tmp_path: Path) -> None:
    pool.run(3, training.steps_again, tmp_path)


def test_all_ranks_raise_the_same(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, training.refuses, tmp_path)

    assert found[0] == found[1] == found[2]
    kinds = [kind for kind, _ in found[0]]
    assert kinds == [
        *["ArgumentError"] * 3,
        *["ArgumentError", "BoundsError", "ArgumentError", "IndexDtypeError"],
        *["CheckpointError"] * 2,
    ], found[0]


@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])
def test_a_save_is_taken_up_on_any_number_of_ranks(pool: Any, tmp_path: Path, shared: bool) -> None:
    found = pool.run_with_groups(training.saves, tmp_path, shared)

    assert found[0] == found[1]
    kinds = ["CheckpointError", "ExistingFileError", "ExistingFileError", "ExistingFileError"]
    assert [kind for kind, _ in found[0]] == kinds, found[0]
    assert "call the checkpoint() of its optimizer" in found[0][0][1]
