"""Gathers of numpy arrays on the CPU device, which run in the extension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.errors import BoundsError, ClosedError, StorageError
from flashwarp.testing import Faulty

ROWS = np.random.default_rng(0).random((100, 6)).astype(np.float32)


@pytest.fixture
def x(tmp_path: Path) -> Iterator[fw.Array]:
    np.save(tmp_path / "rows.npy", ROWS)
    with fw.open(tmp_path / "rows.npy", "r+", device="cpu") as array:
        yield array


@pytest.fixture
def no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the call takes the ordinary way")

    monkeypatch.setattr(fw.Array, "_gather", refuse)


@pytest.mark.usefixtures("no_other_way")
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 2), (1000,)])
def test_rows_are_those_of_numpy(x: fw.Array, dtype: Any, shape: tuple[int, ...]) -> None:
    for seed in range(3):
        index = np.asarray(np.random.default_rng(seed).integers(-100, 100, shape), dtype)
        out = np.empty((*shape, 6), np.float32)

        np.testing.assert_array_equal(x.gather(index), ROWS[index])
        assert x.gather(index, out) is out
        np.testing.assert_array_equal(out, ROWS[index])


@pytest.mark.usefixtures("no_other_way")
def test_rows_moved_are_counted(x: fw.Array) -> None:
    moved = x._attachment.launcher.moved
    x.gather(np.arange(5))
    x.gather(np.arange(3))
    assert (moved.calls, moved.rows) == (2, 8)


@pytest.mark.parametrize(
    "index",
    [
        np.array([99, 100]),
        np.array([0, -101], np.int32),
        np.array([1 << 40]),
    ],
)
def test_an_index_out_of_bounds_reads_nothing(x: fw.Array, index: npt.NDArray[Any]) -> None:
    out = np.full((len(index), 6), 7, np.float32)

    with pytest.raises(BoundsError):
        x.gather(index, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "index",
    [
        np.arange(100)[::-2],
        np.arange(10, dtype=">i8"),
        np.arange(10, dtype=np.uint16),
        np.arange(10).reshape(2, 5).T,
        np.empty(0, np.int64),
        [3, 1],
    ],
)
def test_other_indices_take_the_ordinary_way(x: fw.Array, index: Any) -> None:
    np.testing.assert_array_equal(x.gather(index), ROWS[index])


def test_a_result_that_overlaps_the_indices_is_refused(tmp_path: Path) -> None:
    with fw.create(tmp_path / "n.npy", np.int64, 100, device="cpu") as numbers:
        index = np.arange(10)
        with pytest.raises(fw.errors.ArgumentError, match="overlaps"):
            numbers.gather(index, index)


@pytest.mark.usefixtures("no_other_way")
def test_dtypes_without_a_buffer_are_not_taken_for_others(tmp_path: Path) -> None:
    x = np.arange(100).astype("datetime64[s]")
    np.save(tmp_path / "times.npy", x)
    with (
        fw.open(tmp_path / "times.npy", device="cpu") as times,
        pytest.raises(AssertionError, match="ordinary"),
    ):
        times.gather(np.arange(3))


def test_a_failed_transfer_raises_from_the_call(tmp_path: Path) -> None:
    ROWS.tofile(tmp_path / "rows.bin")
    storage = Faulty(fw.storage.File(tmp_path / "rows.bin"), "read eio")
    with (
        fw.open(storage, dtype=np.float32, shape=ROWS.shape, device="cpu") as x,
        pytest.raises(StorageError),
    ):
        x.gather(np.arange(5))


def test_a_closed_array_raises(x: fw.Array) -> None:
    x.gather(np.arange(5))
    x.close()
    with pytest.raises(ClosedError):
        x.gather(np.arange(5))


def test_watchers_see_what_is_gathered(x: fw.Array) -> None:
    seen: list[tuple[list[int], int]] = []
    with x._turns.watched(lambda starts, nbytes: seen.append((starts.tolist(), nbytes))):
        x.gather(np.array([3, 1]))
    assert seen == [([72, 24], 24)]
