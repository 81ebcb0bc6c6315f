"""A `cupy.RawModule` that includes flashwarp's headers, and reads an array of flashwarp.

    python examples/cupy_raw_module.py

Needs a GPU and cupy. `flashwarp.compile` does the same with less code; this is for programs that
use RawModules already.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

try:
    import cupy
except ImportError as error:
    raise SystemExit(f"this example needs cupy: {error}; try pip install cupy-cuda13x") from error

import flashwarp as fw

SOURCE = """
#include "flashwarp/array.cuh"

extern "C" __global__ void __launch_bounds__(256, 4)
saxpy(const __grid_constant__ fw::array<const float> x, float* y, float a, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    y[i] += a * x[i];
  }
}
"""


def by_value(array: fw.Array) -> np.ndarray:
    """Return the array's struct as cupy passes structs: a numpy array of one record."""
    handle = bytes(array.kernel_handle)
    return np.frombuffer(handle, np.dtype([("words", np.uint64, len(handle) // 8)]))


def main(device: str) -> None:
    """Add a file, scaled, to an array of cupy."""
    values = np.random.default_rng(1).random(4 << 20, np.float32)
    module = cupy.RawModule(
        code=SOURCE, options=("--std=c++20", f"-I{fw.get_include()}"), backend="nvrtc"
    )
    saxpy = module.get_function("saxpy")
    y = cupy.ones(values.size, cupy.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, values)
        with fw.open(path, device=device, cache="1 MiB") as x:
            saxpy((256,), (256,), (by_value(x), y, np.float32(2), np.uint64(x.size)))
            # Waits for the stream; raises if a read failed.
            x.wait(cupy.cuda.get_current_stream())
    np.testing.assert_allclose(cupy.asnumpy(y), 1 + 2 * values, rtol=1e-6)
    print(f"{values.size} numbers added by a kernel of cupy")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        parser.error("cupy compiles for GPUs: kernel.py has a kernel for both devices")
    main(options.device)
