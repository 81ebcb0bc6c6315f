"""The out-of-core merge sort: whatever the keys, and however few fit the device."""

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ReadOnlyError

pytest.importorskip("torch")

from benchmarks.pipelines.base import example

sorting = example("sort_file")


def opened(data, mode="r+"):
    return fw.open(fw.storage.Memory(data), mode, data.dtype, data.shape, device="cpu")


def sorted_keys(data, **sizes):
    made = np.zeros_like(data)
    with opened(data.copy()) as keys, opened(made) as target:
        sorting.sort(keys, target, **sizes)
    return made.reshape(-1)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
@pytest.mark.parametrize(("run", "tile"), [(7, 2), (16, 16), (1, 1), (64, 3), (40, None)])
def test_keys_ascend_and_none_is_lost(dtype, run, tile):
    random = np.random.default_rng(run)
    data = (random.standard_normal((50, 32)) * 100).astype(dtype)

    found = sorted_keys(data, run_rows=run, tile_rows=tile)

    np.testing.assert_array_equal(found, np.sort(data, axis=None))


@pytest.mark.parametrize(
    "keys",
    [
        np.zeros(1024),
        np.arange(1024),
        np.arange(1024)[::-1],
        np.arange(1024) % 3,
        np.tile(np.arange(64), 16),
    ],
    ids=["equal", "sorted", "reversed", "three values", "runs alike"],
)
@pytest.mark.parametrize(("run", "tile"), [(4, 1), (5, 2), (32, 7)])
def test_orders_that_are_hard_for_merges(keys, run, tile):
    data = keys.astype(np.int32).reshape(64, 16)

    found = sorted_keys(data, run_rows=run, tile_rows=tile)

    np.testing.assert_array_equal(found, np.sort(keys))


def test_a_merge_holds_no_more_than_a_tile_and_a_block_of_each_run():
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(1)
    runs = np.sort(random.integers(0, 99, (6, 8 * 16)), axis=1).reshape(48, 16)
    merge = sorting.Merge(runs[:, 0], run_blocks=8, tile_blocks=3)

    left = [tile for batch in merge.batches for tile in merge.step(torch.from_numpy(runs[batch]))]

    assert max(map(len, merge.batches)) == 6 + 3
    assert all(len(batch) == 3 for batch in merge.batches[1:-1])
    assert [len(tile) for rows, tile in left] == [len(rows) for rows, _ in left]
    assert max(len(rows) for rows, _ in left) == 3
    np.testing.assert_array_equal(
        np.concatenate([t.ravel() for _, t in left]), np.sort(runs.ravel())
    )


def test_keys_in_files(tmp_path):
    data = np.random.default_rng(1).integers(-(1 << 31), 1 << 31, (64, 1024), np.int32)
    np.save(tmp_path / "keys.npy", data)
    np.save(tmp_path / "sorted.npy", np.zeros_like(data))

    with (
        fw.open(tmp_path / "keys.npy", "r+", device="cpu", cache="64 KiB") as keys,
        fw.open(tmp_path / "sorted.npy", "r+", device="cpu", cache="64 KiB") as target,
    ):
        sorting.sort(keys, target, run_rows=10, tile_rows=4)

    found = np.load(tmp_path / "sorted.npy")
    np.testing.assert_array_equal(found.reshape(-1), np.sort(data, axis=None))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((8, 8), "float32"), ((8, 4), "int32"), ((64,), "int32")]
)
def test_a_target_that_does_not_fit_is_refused(shape, dtype):
    with (
        opened(np.zeros((8, 8), np.int32)) as keys,
        opened(np.zeros(shape, dtype)) as target,
        pytest.raises(ValueError, match="agree"),
    ):
        sorting.sort(keys, target, run_rows=2)


def test_keys_that_cannot_be_written_are_refused():
    with (
        opened(np.zeros((8, 8), np.int32), "r") as keys,
        opened(np.zeros((8, 8), np.int32)) as target,
        pytest.raises(ReadOnlyError),
    ):
        sorting.sort(keys, target, run_rows=2)


def test_nothing_to_sort():
    assert sorted_keys(np.zeros((0, 8), np.int32), run_rows=2).size == 0
