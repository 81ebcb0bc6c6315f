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
# Of int32: no whole blocks, and 24 blocks. All rows together are dealt to several threads.
WIDTHS = [3001, 3072]


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


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("last", [list(range(ROWS))[::-1], slice(0, ROWS)])
@pytest.mark.parametrize("first", [[2, 7, 30], slice(7, 10)])
def test_of_two_writes_the_later_one_wins(
    tmp_path: Path, width: int, first: Any, last: Any
) -> None:
    path, want = tmp_path / "rows", values(width)
    with pipeline(path, width, "write delay=200000us n=1") as p:
        for content, ids in ((-1, first), (-2, last)):
            want[ids] = content
            p.write_back(ids, want[ids].copy())
        p.flush()
    np.testing.assert_array_equal(np.fromfile(path, "i4").reshape(ROWS, width), want)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ids", [[1, 7, 30], slice(0, ROWS)])
def test_a_read_behind_a_write_sees_it(tmp_path: Path, width: int, ids: Any) -> None:
    want = values(width)
    with pipeline(tmp_path / "rows", width, "write delay=200000us n=1") as p:
        want[7] = -1
        p.write_back([7], want[7:8].copy())
        p.prefetch(ids)
        np.testing.assert_array_equal(p.take(), want[ids])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ids", [list(range(ROWS))[::-1], slice(0, ROWS)])
def test_a_write_does_not_overtake_a_read(tmp_path: Path, width: int, ids: Any) -> None:
    with pipeline(tmp_path / "rows", width, "read delay=200000us n=1") as p:
        p.prefetch([7])
        p.write_back(ids, rows_of(-1, ROWS, width))
        np.testing.assert_array_equal(p.take(), values(width)[[7]])
        p.prefetch([7])
        assert (p.take() == -1).all()


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


@pytest.mark.parametrize("direct", [False, None, True])
def test_batches_that_share_rows_are_as_those_of_a_model(
    tmp_path: Path, direct: bool | None
) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    for turn in range(6):
        count, width = int(rng.integers(50, 2000)), int(rng.choice([1, 3, 100, 128, 1024]))
        path, label = tmp_path / f"{turn}.npy", f"seed {seed}, turn {turn}"
        want = rng.integers(0, 1 << 30, (count, width)).astype(np.int32)
        np.save(path, want)
        with (
            fw.open(path, "r+", device="cpu", cache="1 MiB", o_direct=direct) as x,
            fw.Pipeline(x, 512, workers=2) as p,
        ):
            expected: list[Any] = []
            for _ in range(40):
                ids: Any = rng.permutation(count)[: int(rng.integers(1, min(count, 400)))]
                if rng.random() < 0.3:
                    ids = slice(int(ids.min()), min(int(ids.min()) + 300, count))
                if rng.random() < 0.5:
                    want[ids] = rng.integers(0, 1 << 30, want[ids].shape)
                    p.write_back(ids, want[ids].copy())
                    continue
                p.prefetch(ids)
                expected.append(want[ids].copy())
                if len(expected) == 2:
                    np.testing.assert_array_equal(p.take(), expected.pop(0), label)
            while expected:
                np.testing.assert_array_equal(p.take(), expected.pop(0), label)
        np.testing.assert_array_equal(np.load(path), want, label)


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
