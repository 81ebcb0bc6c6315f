"""A torch custom operator whose kernel reads an embedding table that does not fit in memory.

    python examples/torch_custom_op.py --device cpu

The operator works on CPU and CUDA tensors, in eager mode and under `torch.compile`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

import flashwarp as fw

SOURCE = """
#include "flashwarp/array.cuh"

// The mean of the rows of each bag, as torch.nn.EmbeddingBag computes it.
FW_KERNEL bag_means(fw::array<const float, 2> table, const int64_t* rows, float* means,
                    uint64_t bags, uint64_t rows_per_bag) {
  const uint64_t width = table.extent(1);
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < bags * width; i += step) {
    float sum = 0;
    for (uint64_t k = 0; k < rows_per_bag; k++) {
      sum += table(uint64_t(rows[i / width * rows_per_bag + k]), i % width);
    }
    means[i] = sum / float(rows_per_bag);
  }
}
"""

# An operator takes tensors and numbers only, so it gets the number of a table.
tables: list[tuple[fw.Array, fw.program.Kernel]] = []


@torch.library.custom_op("flashwarp_example::bag_means", mutates_args=())
def bag_means(table: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the means of the table's rows, one for each row of `rows`."""
    array, kernel = tables[table]
    means = rows.new_empty((rows.shape[0], array.shape[1]), dtype=torch.float32)
    # Ordered after what torch has queued, and before what it queues next.
    kernel(array, rows, means, *rows.shape)
    return means


@bag_means.register_fake
def _(table: int, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], tables[table][0].shape[1]), dtype=torch.float32)


def main(name: str | None) -> None:
    """Look up bags in a table sixteen times the size of its cache."""
    weights = np.random.default_rng(1).random((1 << 16, 64), np.float32)
    program = fw.compile(SOURCE, name)
    device = program.device
    rows = torch.randint(0, len(weights), (1000, 5), device=device.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npy"
        np.save(path, weights)
        with fw.open(path, device=device, cache="1 MiB") as array:
            tables.append((array, program["bag_means"]))
            means = bag_means(0, rows)
            torch.library.opcheck(bag_means, (0, rows))
            array.wait()
            tables.clear()
    expected = torch.from_numpy(weights)[rows.cpu()].mean(1)
    torch.testing.assert_close(means.cpu(), expected)
    print(f"{device.name}: {len(rows)} bags read by a custom operator")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    main(parser.parse_args().device)
