"""Pipelines whose rows the engine's threads move on the CPU device, past the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.storage import Memory, Striped

ROWS, WIDTH = 2000, 128


def values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def opened(storage: Any, mode: str = "r+", **options: Any) -> fw.Array:
    return fw.open(storage, mode, "f4", (ROWS, WIDTH), device="cpu", cache="64 KiB", **options)


def test_modelled_drives_serve_the_workers() -> None:
    stripe = Striped([Memory(ROWS * WIDTH * 2) for _ in range(2)], stripe="4 KiB")
    controller = fw.nvme.SoftwareController(model="p5800x")
    with opened(stripe, controller=controller) as x:
        x[:] = values()
        x.flush()
        with fw.Pipeline(x, 100, workers=2) as p:
            for rows, ids in p.iterate(np.array([k, 2 * k, 5 * k]) for k in range(300)):
                np.testing.assert_array_equal(rows, values()[ids])


@pytest.mark.parametrize("o_direct", [False, True])
def test_the_file_may_be_opened_again_when_both_are_closed(o_direct: bool, tmp_path: Path) -> None:
    np.zeros((256, 1024), np.int32).tofile(tmp_path / "rows")
    kept = []
    for turn in range(3):
        with (
            fw.open(
                tmp_path / "rows", "r+", np.int32, (256, 1024), device="cpu", o_direct=o_direct
            ) as x,
            fw.Pipeline(x, 64, workers=1) as p,
        ):
            kept.append(p)
            p.write_back(np.arange(64), np.full((64, 1024), turn + 1, np.int32))
            p.flush()
    assert (np.fromfile(tmp_path / "rows", np.int32)[: 64 * 1024] == 3).all()
