"""Pipelines: batches arrive in their order, in buffers that nobody else uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceTimeout,
    ReadOnlyError,
    StorageError,
)
from flashwarp.storage import File
from flashwarp.testing.faults import Faulty

ROWS, WIDTH = 2000, 24
WAYS: list[dict[str, Any]] = [{}, {"workers": 1}]


def values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


@pytest.fixture
def array(tmp_path: Path) -> Iterator[fw.Array]:
    np.save(tmp_path / "rows.npy", values())
    with fw.open(tmp_path / "rows.npy", mode="r+", device="cpu", cache="64 KiB") as x:
        yield x


def test_a_buffer_is_the_callers_until_the_next_take(array: fw.Array) -> None:
    with fw.Pipeline(array, 10, depth=3) as p:
        for k in range(3):
            p.prefetch(np.arange(10 * k, 10 * k + 10))
        held = p.take()
        p.prefetch(np.arange(100, 110))  # as many in flight as the depth allows
        np.testing.assert_array_equal(held, values()[:10])
        second = p.take()
        assert not np.shares_memory(held, second)


def test_the_stats_and_the_explanation_name_the_way(array: fw.Array) -> None:
    with fw.Pipeline(array, 10) as p:
        p.prefetch([1, 2, 3])
        p.take()
        moved = p.stats.moved["direct, prefetch"]
        assert (moved.batches, moved.rows, moved.nbytes) == (1, 3, 3 * WIDTH * 4)
        assert "direct" in str(p.explain())
        assert p.explain().facts["multiprocessors"] == 0


# Bad input.


def test_more_batches_than_the_depth_are_refused(array: fw.Array) -> None:
    with fw.Pipeline(array, 4, depth=2) as p:
        p.prefetch([1])
        p.prefetch([2])
        with pytest.raises(ArgumentError, match="depth=2"):
            p.prefetch([3])
        assert p.take()[0, 0] == WIDTH
        p.prefetch([3])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_rows": 0}, "batch_rows"),
        ({"batch_rows": 2.5}, "batch_rows"),
        ({"batch_rows": 5, "depth": 0}, "depth"),
    ],
)
def test_options_out_of_their_limits(array: fw.Array, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        fw.Pipeline(array, **options)


def test_what_is_no_array_of_rows(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="ndarray"):
        fw.Pipeline(np.zeros((3, 3)), 2)  # type: ignore[arg-type]
    np.save(tmp_path / "one.npy", np.float32(3))
    with fw.open(tmp_path / "one.npy", device="cpu") as x, pytest.raises(ArgumentError):
        fw.Pipeline(x, 2)


def test_an_array_that_is_only_read_takes_no_writes(array: fw.Array, tmp_path: Path) -> None:
    array.close()
    with (
        fw.open(tmp_path / "rows.npy", device="cpu") as x,
        fw.Pipeline(x, 4) as p,
        pytest.raises(ReadOnlyError),
    ):
        p.write_back([1], np.zeros((1, WIDTH), np.float32))


@pytest.mark.parametrize("options", WAYS, ids=["direct", "workers"])
def test_a_batch_that_fails_raises_at_its_own_end(tmp_path: Path, options: dict[str, Any]) -> None:
    values().tofile(tmp_path / "f")
    storage = Faulty(File(tmp_path / "f"), "read eio bytes=4096-8192")
    with (
        fw.open(storage, dtype="f4", shape=(ROWS, WIDTH), device="cpu", line="4 KiB") as x,
        fw.Pipeline(x, 8, depth=3, **options) as p,
    ):
        p.prefetch([0, 1])
        p.prefetch([50, 51])  # of the line that fails
        p.prefetch([500])
        np.testing.assert_array_equal(p.take(), values()[:2])
        with pytest.raises(StorageError):
            p.take()
        np.testing.assert_array_equal(p.take(), values()[500:501])


def test_a_storage_that_does_not_answer_ends_the_wait(tmp_path: Path) -> None:
    values().tofile(tmp_path / "f")
    storage = Faulty(File(tmp_path / "f"), "read delay=1500000us n=1")
    with (
        fw.open(storage, dtype="f4", shape=(ROWS, WIDTH), device="cpu") as x,
        fw.Pipeline(x, 8, timeout_s=0.1) as p,
    ):
        p.prefetch([0])
        with pytest.raises(DeviceTimeout, match="1 rows to prefetch"):
            p.take()
        x.wait()


@pytest.mark.parametrize("options", WAYS, ids=["direct", "workers"])
def test_the_end_with_batches_in_flight(array: fw.Array, options: dict[str, Any]) -> None:
    p = fw.Pipeline(array, 4, **options)
    p.prefetch([1])
    p.write_back([2], np.zeros((1, WIDTH), np.float32))
    p.close()
    p.close()
    assert p.closed
    for call in (lambda: p.prefetch([1]), p.take, p.flush):
        with pytest.raises(ClosedError):
            call()
    assert not array[2].any()


def test_an_array_that_closes_first(array: fw.Array) -> None:
    p = fw.Pipeline(array, 4)
    p.prefetch([1])
    array.close()
    with pytest.raises(ClosedError):
        p.prefetch([1])
    p.close()


def test_a_loop_has_as_many_batches_in_flight_as_the_depth_allows(array: fw.Array) -> None:
    with fw.Pipeline(array, 4, depth=2) as p:
        assert [p.in_flight for _ in p.iterate([k] for k in range(5))] == [2, 2, 2, 1, 0]


def test_a_loop_that_ends_early_leaves_nothing_in_flight(array: fw.Array) -> None:
    with fw.Pipeline(array, 4, depth=3) as p:
        for rows, _ in p.iterate([k] for k in range(100)):
            if rows[0, 0] == 5 * WIDTH:
                break
        assert p.in_flight == 0
        p.prefetch([7])
        assert p.take()[0, 0] == 7 * WIDTH


KERNEL = """
#include "flashwarp/batch.cuh"

FW_KERNEL add_one(fw::pipeline<float> p, const int64_t* ids, uint64_t n, float* rows,
                  uint64_t width) {
  p.prefetch(ids, n, rows);
  p.prefetch_wait();
  for (uint64_t i = fw::warp::index(); i < n * width; i += fw::warp::count()) rows[i] += 1;
  p.write_back(ids, n, rows);
  p.write_back_wait();
}
"""


def test_kernels_start_batches_of_a_pipeline(array: fw.Array) -> None:
    device = array.device
    kernel = fw.compile(KERNEL, device)["add_one"]
    ids, rows = np.arange(0, 200, 2), np.empty((100, WIDTH), np.float32)
    with fw.Pipeline(array, 100) as p:
        kernel(p, ids, len(ids), rows, WIDTH, warps=1)
        p.check()
        np.testing.assert_array_equal(rows, values()[ids] + 1)
        with pytest.raises(ArgumentError, match="kernels"):
            array.gather(ids)
    np.testing.assert_array_equal(array.gather(ids), values()[ids] + 1)
