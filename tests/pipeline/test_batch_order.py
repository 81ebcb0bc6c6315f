"""Batches that share rows act in the order of their calls; others move beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CpuDevice
from flashwarp.errors import ControllerTimeout
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.storage import File, Memory
from flashwarp.testing.faults import Faulty

ROWS = 40


def values(width: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width)


@contextlib.contextmanager
def pipeline(path: Path, width: int, faults: str, **options: Any) -> Iterator[fw.Pipeline]:
    """Threads that write rows of a file in which some operations are slow."""
    values(width).tofile(path)
    with (
        Faulty(File(path, writable=True), faults) as storage,
        fw.open(storage, "r+", "i4", (ROWS, width), device="cpu") as x,
        fw.Pipeline(x, ROWS, **{"depth": 8, "workers": 4, **options}) as p,
    ):
        yield p


def rows_of(content: int, count: int, width: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.full((count, width), content, np.int32)


def test_rows_that_no_batch_shares_wait_for_nobody(tmp_path: Path) -> None:
    # An operation that hangs ends with the time limit.
    with pipeline(tmp_path / "rows", 128, "write hang n=1", timeout_s=2) as p:
        stuck = p.write_back([7], rows_of(-1, 1, 128))
        p.prefetch([30, 3])
        p.prefetch(slice(8, 20))
        np.testing.assert_array_equal(p.take(), values(128)[[30, 3]])
        np.testing.assert_array_equal(p.take(), values(128)[8:20])
        assert not stuck.done()
        with pytest.raises(ControllerTimeout):
            p.reclaim()


def test_a_row_that_waits_leaves_the_others_of_its_batch_their_way(tmp_path: Path) -> None:
    buffer, other = np.zeros((3, 128), "i4"), rows_of(-1, 1, 128)
    values(128).tofile(tmp_path / "rows")
    with (
        Faulty(File(tmp_path / "rows", writable=True), "write hang n=1") as storage,
        BatchEngine(
            CpuDevice(), storage, rows=ROWS, row_bytes=512, batch_rows=8, workers=2, timeout_s=2,
            directions=("prefetch", "write_back"),
        ) as engine,
    ):  # fmt: skip
        write = engine.submit("write_back", [7], other.ctypes.data)
        read = engine.submit("prefetch", [3, 7, 30], buffer.ctypes.data)
        while not (buffer[0, 1] and buffer[2, 1]):
            assert not engine.ended("prefetch", read)
        assert not buffer[1].any()
        with pytest.raises(ControllerTimeout):
            engine.wait("write_back", write)
        engine.wait("prefetch", read)
        np.testing.assert_array_equal(buffer, values(128)[[3, 7, 30]])


def test_a_write_that_fails_lets_go_of_those_that_wait(tmp_path: Path) -> None:
    with pipeline(tmp_path / "rows", 128, "write eio n=1") as p:
        p.write_back([7], rows_of(-1, 1, 128))
        p.write_back([6, 7], rows_of(-2, 2, 128))
        p.prefetch([7, 6])
        assert (p.take() == -2).all()
        with pytest.raises(fw.errors.StorageError):
            p.reclaim()


def test_a_row_twice_in_a_batch_waits_for_no_end_of_its_own() -> None:
    table = values(3)
    with BatchEngine(
        CpuDevice(), Memory(table), rows=ROWS, row_bytes=12, batch_rows=8,
        directions=("prefetch", "write_back"),
    ) as engine:  # fmt: skip
        rows = rows_of(-1, 8, 3)
        engine.wait("write_back", engine.submit("write_back", [4, 4, 5, 4], rows.ctypes.data))
    assert (table[4:6] == -1).all()


def test_no_batch_fills_a_buffer_that_is_being_written_back(tmp_path: Path) -> None:
    path, want = tmp_path / "rows", values(3072)
    with pipeline(path, 3072, "write delay=100000us", depth=1) as p:
        for first in range(0, ROWS, 4):
            p.prefetch(slice(first, first + 4))
            rows = p.take()
            rows += 1
            p.write_back(slice(first, first + 4), rows)
        p.flush()

    np.testing.assert_array_equal(np.fromfile(path, "i4").reshape(ROWS, 3072), want + 1)
