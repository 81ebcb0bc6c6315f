"""The out-of-core product of matrices is numpy's."""

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ReadOnlyError

pytest.importorskip("torch")

from benchmarks.pipelines.base import example

gemm = example("matmul_files")


def opened(data, mode="r"):
    return fw.open(fw.storage.Memory(data), mode, data.dtype, data.shape, device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("panel", "slab"), [(8, 8), (7, 3), (1, 100), (100, 1)])
def test_product_is_that_of_numpy(dtype, panel, slab):
    random = np.random.default_rng(1)
    x, y = random.random((20, 33)).astype(dtype), random.random((33, 17)).astype(dtype)
    made = np.zeros((20, 17), dtype)

    with opened(x) as a, opened(y) as b, opened(made, "r+") as product:
        gemm.multiply(a, b, product, panel_rows=panel, slab_rows=slab)

    np.testing.assert_allclose(made, x @ y, rtol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        (((4, 5), (4, 6), (4, 6)), "fff"),
        (((4, 5), (5, 6), (6, 4)), "fff"),
        (((4, 5), (5, 6), (4, 6)), "ffd"),
        (((4, 5), (5, 6), (4, 6)), "iii"),
        (((20,), (5, 6), (4, 6)), "fff"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(shapes, dtypes):
    arrays = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with (
        opened(arrays[0]) as a,
        opened(arrays[1]) as b,
        opened(arrays[2], "r+") as product,
        pytest.raises(ValueError),
    ):
        gemm.multiply(a, b, product, panel_rows=2, slab_rows=2)


def test_a_product_that_cannot_be_written_is_refused():
    x = np.zeros((4, 4), np.float32)
    with (
        opened(x) as a,
        opened(x.copy()) as b,
        opened(x.copy(), "r") as product,
        pytest.raises(ReadOnlyError),
    ):
        gemm.multiply(a, b, product, panel_rows=2, slab_rows=2)
