"""Partner copies over torch.distributed: ranks that lose their disk, a byte, or their partner."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import flashwarp.torch
from flashwarp.checkpoint.directory import Directory
from flashwarp.errors import ArgumentError
from interop import dcp_ranks, partner_ranks
from support.samples import EVERYTHING


# Each rank imports torch, twice.
@pytest.mark.parametrize("ranks", [2, 4] if EVERYTHING else [2])
def test_a_lost_or_damaged_version_comes_back_from_the_partner(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "nodes"

    assert dcp_ranks.run(ranks, partner_ranks.write, folder, 3) == [""] * ranks

    for rank in range(ranks):
        kept = folder / f"node-{(rank + 1) % ranks}" / "kept"
        with Directory(kept, rank, writable=False) as directory:
            assert [each.problem for each in directory.examine("default", verify=True)] == ["", ""]
    assert dcp_ranks.run(ranks, partner_ranks.read_again, folder) == [""] * ranks


def test_a_partner_that_dies_leaves_the_own_folder_usable(tmp_path: Path) -> None:
    folder = tmp_path / "nodes"
    folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    processes = [
        spawn.Process(
            target=dcp_ranks._rank,
            args=(rank, 2, tmp_path / "store", answers, partner_ranks.partner_dies, folder, ()),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()

    assert answers.get(timeout=120) == (0, "")

    for process in processes:
        process.join(30)
        process.kill()


def test_partners_need_ranks(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"need torch\.distributed"):
        flashwarp.torch.Partners(tmp_path)
