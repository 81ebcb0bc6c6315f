"""Tiles on the CPU device: an array from front to back, and stores back to its storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, ReadOnlyError, StorageError
from flashwarp.storage import File
from flashwarp.testing.faults import Faulty

WIDTH = 24


def values(rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)


def opened(data: np.ndarray[Any, Any], mode: str = "r+") -> fw.Array:
    return fw.open(fw.storage.Memory(data), mode, data.dtype, data.shape, device="cpu")


def test_three_arrays_tile_by_tile() -> None:
    a, b, c = values(100), values(100) * 3, np.zeros((100, WIDTH), np.float32)
    with opened(a, "r") as x, opened(b, "r") as y, opened(c) as z:
        streams = (
            fw.Pipeline.tiles(x, 7),
            fw.Pipeline.tiles(y, 7),
            fw.Pipeline.tiles(z, 7, writable=True, read=False),
        )
        for one, two, total in zip(*streams, strict=True):
            np.add(one, two, out=total)
        np.testing.assert_array_equal(z[:], 4 * a)


def test_the_tile_at_which_a_loop_ends_is_stored() -> None:
    with opened(values(100)) as x:
        for k, tile in enumerate(fw.Pipeline.tiles(x, 10, writable=True)):
            tile[:] = -1
            if k == 3:
                break
        assert (x[:40] == -1).all()
        np.testing.assert_array_equal(x[40:], values(100)[40:])


def test_tiles_of_what_cannot_be_stored() -> None:
    with opened(values(10), "r") as x:
        with pytest.raises(ReadOnlyError):
            list(fw.Pipeline.tiles(x, 4, writable=True))
        with pytest.raises(ArgumentError, match="writable=True"):
            fw.Pipeline.tiles(x, 4, read=False)
        with pytest.raises(ArgumentError, match="batch_rows"):
            list(fw.Pipeline.tiles(x, 0))
        with pytest.raises(ArgumentError, match="library='cuda'"):
            list(fw.Pipeline.tiles(x, 4, library="cuda"))


def test_a_tile_that_cannot_be_read_is_raised_in_its_turn(tmp_path: Path) -> None:
    values(1000).tofile(tmp_path / "f")
    storage = Faulty(File(tmp_path / "f"), "read eio bytes=50000-50001")
    with fw.open(storage, dtype="f4", shape=(1000, WIDTH), device="cpu", line="4 KiB") as x:
        tiles = fw.Pipeline.tiles(x, 100)
        for k in range(5):
            np.testing.assert_array_equal(next(tiles), values(1000)[100 * k : 100 * (k + 1)])
        with pytest.raises(StorageError):
            next(tiles)


def test_a_row_may_not_be_written_twice_in_a_batch() -> None:
    with opened(values(10)) as x, fw.Pipeline(x, 4) as p:
        with pytest.raises(ArgumentError, match="row 9"):
            p.write_back([9, 1, -1], np.zeros((3, WIDTH), np.float32))
        p.flush()
        np.testing.assert_array_equal(x[:], values(10))
