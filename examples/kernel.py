"""The smallest kernel of your own: a histogram of a file that does not fit the cache.

    python examples/kernel.py --device cpu

The kernel is CUDA C++. The same text runs on a GPU and on the CPU device.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import flashwarp as fw

SOURCE = """
#include "flashwarp/array.cuh"

FW_KERNEL histogram(fw::array<const uint8_t> data, uint32_t* counts) {
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < data.size(); i += step) {
    fw::atomic::add_relaxed(&counts[data[i]], 1u);
  }
}
"""


def main(device: str | None) -> None:
    """Count the bytes of a file with a kernel, and with numpy."""
    values = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npy"
        np.save(path, values)
        program = fw.compile(SOURCE, device)
        counts = program.device.empty_array((256,), np.uint32)
        with fw.open(path, device=program.device, cache="1 MiB") as data:
            program["histogram"](data, counts)
            data.wait()
    assert (counts.copy_to_host() == np.bincount(values)).all()
    print(f"{program.device.name}: {values.size} bytes counted through a cache of 1 MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    main(parser.parse_args().device)
