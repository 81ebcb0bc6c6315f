"""Loads by all ranks: one read of the files, the bytes of `flashwarp.load`, and misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from distributed import loads


@pytest.mark.parametrize(("ranks", "share"), [(1, 1 << 20), (2, 4096), (3, 8192), (4, 1 << 20)])
def test_all_ranks_have_all_tensors_and_read_each_byte_once(
    pool: Any, tmp_path: Path, ranks: int, share: int
) -> None:
    loads.write(tmp_path, ranks)

    found = pool.run(ranks, loads.reads_once, tmp_path, share)

    assert sum(read for read, _ in found) == found[0][1]
    assert max(read for read, _ in found) < found[0][1] / ranks + 2 * share


def test_bad_input_of_one_rank_is_the_same_error_on_all(pool: Any, tmp_path: Path) -> None:
    found = pool.run(3, loads.bad_loads, tmp_path)

    assert found == [found[0]] * 3
    kinds = [kind for kind, _ in found[0]]
    assert kinds == ["ArgumentError", "MissingFileError", "ArgumentError", "StorageError"], found[0]
    assert "(ranks [0, 2])" in found[0][0][1]
    assert "rank 1: " in found[0][1][1]
