"""Kernels in Python, compiled by numba-cuda, over an array that does not fit the cache.

    python examples/numba_kernel.py

Needs a GPU and `pip install 'flashwarp[numba]'`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numba import cuda

import flashwarp as fw
from flashwarp.interop.numba import jit, prefetch, read_async


@jit
def pick(out, data, indices):
    """Copy elements in the order of their indices, and prefetch the next one meanwhile."""
    step = cuda.gridsize(1)
    for i in range(cuda.grid(1), out.size, step):
        if i + step < out.size:
            prefetch(data, indices[i + step])
        out[i] = data[indices[i]]


@jit
def sum_rows(sums, data):
    """Sum each row of 64 elements, in a buffer that belongs to the thread."""
    buffer = cuda.local.array(64, np.float32)
    for row in range(cuda.grid(1), sums.size, cuda.gridsize(1)):
        token = read_async(data, row * 64, 64, buffer)
        total = np.float32(0)
        if token.wait() == 0:
            for k in range(64):
                total += buffer[k]
        sums[row] = total


def main(device: str) -> None:
    """Read 32 MiB through a cache of 4 MiB."""
    values = np.random.default_rng(1).integers(0, 100, 8 << 20).astype(np.float32)
    indices = np.random.default_rng(2).integers(0, values.size, 1 << 20)
    out, sums = cuda.device_array(indices.size, np.float32), cuda.device_array(1000, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npy"
        np.save(path, values)
        with fw.open(path, device=device, cache="4 MiB") as data:
            pick[256, 256](out, data, cuda.to_device(indices))
            sum_rows[8, 128](sums, data)
            data.wait()
    assert (out.copy_to_host() == values[indices]).all()
    assert (sums.copy_to_host() == values[:64000].reshape(1000, 64).sum(1)).all()
    print(f"{indices.size} elements and 1000 rows read by Python kernels")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        parser.error("numba-cuda compiles for GPUs: kernel.py has a kernel for both devices")
    main(options.device)
