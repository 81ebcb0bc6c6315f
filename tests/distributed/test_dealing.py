"""Which rank has a row: a permutation that every rank computes alike, and that spreads rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from flashwarp.distributed.dealing import HASHED_ROWS_MAX, Dealing, _times
from flashwarp.errors import ArgumentError

COUNTS = [0, 1, 2, 3, 5, 8, 13, 100, 1000, 4096, 6765, 65_536]


@pytest.mark.parametrize("deal", ["range", "hash"])
@pytest.mark.parametrize("rows", COUNTS)
def test_each_row_has_one_place_and_shards_are_even(deal: str, rows: int) -> None:
    for ranks in (1, 3, 4, 64):
        dealing = Dealing(deal, rows, ranks)

        owner, local = dealing.owners(torch.arange(rows))

        sizes = np.diff(dealing.starts)
        assert sizes.sum() == rows
        assert sizes.max() - sizes.min() <= 1
        for rank in range(ranks):
            first, last = dealing.starts[rank : rank + 2]
            ids = dealing.ids(first, last)
            assert (owner[ids] == rank).all()
            assert (local[ids] == torch.arange(last - first)).all()


@pytest.mark.parametrize("rows", [65_536, 1 << 20, 1_000_003])
def test_the_hash_spreads_neighbours_and_steps(rows: int) -> None:
    dealing = Dealing("hash", rows, 4)

    # In small arrays some steps, times the factor, are nearly a fraction of the rows.
    for step in (1, 2, 3, 4, 7, 8, 64, 100):
        owner, _ = dealing.owners(torch.arange(0, rows, step)[:256])
        share = torch.bincount(owner, minlength=4) / len(owner)
        assert 0.15 < share.min() <= share.max() < 0.4, step


def test_products_do_not_overflow() -> None:
    draw = np.random.default_rng(1)
    for bits in (1, 20, 31, 32, 40, 48):
        modulus = int(draw.integers(1, 1 << bits)) + 1
        numbers = draw.integers(0, modulus, 100)
        factor = int(draw.integers(0, modulus))

        found = _times(factor, torch.from_numpy(numbers), modulus)

        assert found.tolist() == [int(each) * factor % modulus for each in numbers]


def test_the_largest_arrays_are_dealt() -> None:
    rows = HASHED_ROWS_MAX
    ids = torch.tensor([0, 1, rows // 2, rows - 1])

    for deal, ranks in itertools.product(("range", "hash"), (1, 3, 1000)):
        dealing = Dealing(deal, rows, ranks)
        owner, local = dealing.owners(ids)
        for each, rank, at in zip(ids.tolist(), owner.tolist(), local.tolist(), strict=True):
            place = dealing.starts[rank] + at
            assert dealing.ids(place, place + 1).tolist() == [each]
    with pytest.raises(ArgumentError, match="by hash at most"):
        Dealing("hash", rows + 1, 2)
