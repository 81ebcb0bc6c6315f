"""What a pipeline is given and cannot do, by both ways of the CPU device: refused, nothing lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, BoundsError, FlashwarpError, StorageError
from flashwarp.storage import File, Memory
from flashwarp.testing.faults import Faulty

ROWS, WIDTH = 100, 256
WAYS = ({}, {"workers": 1})


def values() -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def ones(rows: int) -> np.ndarray:
    return np.ones((rows, WIDTH), np.float32)


def writes(p: fw.Pipeline, ids: Any, rows: Any) -> None:
    p.write_back(ids, rows)
    p.reclaim()


def stores(p: fw.Pipeline, ids: Any, rows: Any) -> None:
    writes(p, ids, rows)
    p.flush()


@pytest.fixture(params=WAYS, ids=["direct", "workers"])
def options(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def pipeline(options: dict[str, Any]) -> Iterator[fw.Pipeline]:
    """A pipeline; at its end, row 7 can be written and read, and all others are as they were."""
    data = values()
    memory = Memory(data)
    with fw.open(memory, "r+", np.float32, data.shape, device="cpu") as array:
        with fw.Pipeline(array, 8, depth=2, **options) as p:
            yield p
            p.prefetch([7, 0])
            np.testing.assert_array_equal(p.take(), values()[[7, 0]])
            writes(p, [7], ones(1))
        expected = values()
        expected[7] = 1
        np.testing.assert_array_equal(array[:], expected)


@pytest.mark.parametrize(
    ("ids", "twice"),
    [
        ([9, 1, 9], 9),
        ([ROWS - 1, -1], ROWS - 1),
        (np.array([4, 3, 4], np.int32), 4),
        (np.array([0, 0]), 0),
    ],
    ids=str,
)
def test_a_row_twice_in_a_batch_of_writes(pipeline: fw.Pipeline, ids: Any, twice: int) -> None:
    with pytest.raises(ArgumentError, match=f"row {twice} occurs more than once"):
        pipeline.write_back(ids, ones(len(ids)))


def test_a_row_twice_in_a_batch_of_reads_comes_twice(pipeline: fw.Pipeline) -> None:
    pipeline.prefetch([3, 3, -1, 3])
    np.testing.assert_array_equal(pipeline.take(), values()[[3, 3, -1, 3]])


@pytest.mark.parametrize("ids", [[ROWS], [-ROWS - 1], [1, 1 << 40], range(95, 103)], ids=str)
def test_rows_out_of_range(pipeline: fw.Pipeline, ids: Any) -> None:
    with pytest.raises(BoundsError, match=str(ROWS)):
        pipeline.prefetch(ids)
    with pytest.raises(BoundsError, match=str(ROWS)):
        pipeline.write_back(ids, ones(len(ids)))
    assert pipeline.in_flight == 0


def test_more_rows_than_a_batch_has(pipeline: fw.Pipeline) -> None:
    with pytest.raises(ArgumentError, match="batch_rows=8"):
        pipeline.prefetch(range(9))


@pytest.mark.parametrize(
    "ids",
    [[1.5], np.array([1.0]), np.array(["1"]), np.array([[1]]), "1", None, {1}, np.array(1), 3],
    ids=repr,
)
def test_ids_of_a_wrong_kind(pipeline: fw.Pipeline, ids: Any) -> None:
    with pytest.raises(FlashwarpError):
        pipeline.prefetch(ids)
    with pytest.raises(FlashwarpError):
        pipeline.write_back(ids, ones(1))
    assert pipeline.in_flight == 0


@pytest.mark.parametrize(
    "rows",
    [
        ones(2).astype(np.float64),
        ones(2).astype(">f4"),
        ones(3),
        ones(2)[:, ::2],
        ones(2).reshape(-1),
        np.ones((WIDTH, 2), np.float32).T,
        ones(2).tolist(),
        None,
        "ones",
    ],
    ids=["float64", "big-endian", "three", "half", "flat", "transposed", "list", "None", "text"],
)
def test_rows_of_a_wrong_kind(pipeline: fw.Pipeline, rows: Any) -> None:
    with pytest.raises(FlashwarpError):
        writes(pipeline, [1, 2], rows)


def test_synchronize_without_a_batch(pipeline: fw.Pipeline) -> None:
    with pytest.raises(ArgumentError, match="prefetch"):
        pipeline.take()
    pipeline.reclaim()  # without a write, there is nothing to order


def test_rows_that_lie_at_no_multiple_of_their_size_are_written(options: dict[str, Any]) -> None:
    memory = Memory(values())
    odd = np.zeros(2 * WIDTH * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, WIDTH)
    with fw.open(memory, "r+", np.float32, (ROWS, WIDTH), device="cpu") as array:
        with fw.Pipeline(array, 8, **options) as p:
            writes(p, [5, 6], odd)
        assert not array[5:7].any()


def test_writes_that_fail_raise_at_their_own_end_and_later_ones_run(
    options: dict[str, Any], tmp_path: Path
) -> None:
    values().tofile(tmp_path / "f")
    storage = Faulty(File(tmp_path / "f", writable=True), "write eio bytes=51200-51201")
    array = fw.open(
        storage, "r+", np.float32, (ROWS, WIDTH), device="cpu", cache="64 KiB", line="1 KiB"
    )
    with fw.Pipeline(array, 8, **options) as p:
        with pytest.raises(StorageError):
            stores(p, [49, 50, 51], ones(3))
        writes(p, [60], ones(1))
        p.prefetch([60, 70])
        np.testing.assert_array_equal(p.take(), [ones(1)[0], values()[70]])
    # The cache has the row that was not stored, and says so to the end; workers write past it.
    with contextlib.nullcontext() if options else pytest.raises(StorageError):
        array.close()
    found = np.fromfile(tmp_path / "f", np.float32).reshape(ROWS, WIDTH)
    np.testing.assert_array_equal(found[[49, 51, 60]], ones(3))
    np.testing.assert_array_equal(found[50], values()[50])
