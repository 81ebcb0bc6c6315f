"""Sorting and products of matrices on a GPU, from each kind of storage, and their benchmark."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import flashwarp as fw
from benchmarks.pipelines import pipelines
from benchmarks.pipelines.base import example

pytestmark = pytest.mark.gpu

STORAGES = ("memory", "page cache", "O_DIRECT")


@pytest.fixture(params=STORAGES)
def opened(request, tmp_path):
    """Return a function that opens an array, and one that reads what it then holds."""
    held = {}

    def open_array(name, data, mode="r"):
        if request.param == "memory":
            held[name] = data.copy()
            source, settings = fw.storage.Memory(held[name]), {}
        else:
            source, settings = tmp_path / name, {"o_direct": request.param == "O_DIRECT"}
            data.tofile(source)
        return fw.open(
            source, mode, data.dtype, data.shape, device="cuda:0", cache="1 MiB", **settings
        )

    def content(name, dtype):
        if request.param == "memory":
            return held[name].reshape(-1)
        return np.fromfile(tmp_path / name, dtype)

    return open_array, content


@pytest.mark.parametrize(("run", "tile"), [(100, 16), (1000, 64), (1, 3)])
def test_keys_ascend_and_none_is_lost(opened, run, tile):
    open_array, content = opened
    data = np.random.default_rng(run).integers(-(1 << 31), 1 << 31, (700, 1024), np.int32)

    with (
        open_array("keys", data, "r+") as keys,
        open_array("sorted", np.zeros_like(data), "r+") as target,
    ):
        example("sort_file").sort(keys, target, run_rows=run, tile_rows=tile)

    np.testing.assert_array_equal(content("sorted", np.int32), np.sort(data, axis=None))


def test_product_is_that_of_numpy(opened):
    open_array, content = opened
    random = np.random.default_rng(1)
    x, y = (random.standard_normal((768, 1024), np.float32) for _ in "xy")

    with (
        open_array("x", x) as a,
        open_array("y", np.ascontiguousarray(y.T)) as b,
        open_array("product", np.zeros((768, 768), np.float32), "r+") as product,
    ):
        example("matmul_files").multiply(a, b, product, panel_rows=200, slab_rows=128)

    found = content("product", np.float32).reshape(768, 768)
    np.testing.assert_allclose(found, x @ y.T, atol=1e-2)


@pytest.mark.parametrize("part", pipelines.PARTS)
def test_benchmark_finds_all_data_right(tmp_path, part):
    report = pipelines.run(
        "cuda:0", tmp_path, part, size="64 MiB", batch="4 MiB", rows="4 KiB,64 KiB", steps=3,
        runs=1, dims="128", models="GCN", seeds=64, keys=1.0, side=512,
    )  # fmt: skip

    assert report.rows
    assert report.wrong == []
