"""Multiply a sparse matrix that is larger than the cache with a vector: y = A x.

    python examples/spmv.py --graph matrix.mtx
    python examples/spmv.py --graph kron:18

Columns and values are two arrays on one cache. A warp sums the part of a row that lies in its chunk
and adds it to y, so many warps share a long row. The diagonal is left out, because the matrix is
read as a graph.
"""

import argparse
import tempfile

import numpy as np

import flashwarp as fw
from flashwarp import graphs

KERNEL = """
#include "flashwarp/graph.cuh"

using namespace fw;

// graph::for_each calls this with each entry.
struct sum_of_rows {
  cursor<const float>& values;
  const float* x;
  float* y;
  uint64_t columns;
  float sum = 0;

  FW_DEVICE void operator()(uint64_t, uint64_t i, uint32_t column) {
    if (column < columns) sum += values[i] * x[column];
  }
  // Each lane has summed its part of the row.
  FW_DEVICE void finish(uint64_t row) {
    const float all = graph::sum_of_lanes(sum);
    if (warp::lane() == 0) atomic::add_relaxed(&y[row], all);
    sum = 0;
  }
};

FW_KERNEL multiply(const FW_GRID_CONSTANT array<const uint32_t> columns,
                   const FW_GRID_CONSTANT array<const float> values,
                   const FW_GRID_CONSTANT graph::rows rows, const float* x, float* y) {
  graph::cached entries(columns);
  cursor<const float> value(values);
  graph::for_each(
      rows, entries, [](uint64_t) { return true; }, sum_of_rows{value, x, y, rows.vertices});
}
"""


def multiply(matrix, columns, values, x):
    """Return A x; `columns` and `values` share a cache."""
    device = columns.device
    kernel = fw.compile(KERNEL, device)["multiply"]
    y = np.zeros(matrix.vertices, np.float32)
    with (
        graphs.Rows(matrix, columns) as rows,
        device.allocate(y.nbytes) as x_on_device,
        device.allocate(y.nbytes) as y_on_device,
    ):
        device.upload(x_on_device.address, np.ascontiguousarray(matrix.by_vertex(x), np.float32))
        kernel(columns, values, rows.handle, x_on_device, y_on_device, warps=rows.chunks)
        for array in (columns, values):
            array.wait()  # waits; raises if a read failed
        device.download_into(y_on_device.address, y)
    return matrix.by_label(y)


def with_weights(graph):
    """Add random weights to a graph that has none."""
    if not graph.weighted:
        np.save(graph.weights_path, np.random.default_rng(1).random(graph.entries, np.float32))
        graph = graphs.CsrGraph.open(graph.folder)
    return graph


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="kron:12", help="FILE, kron:SCALE or urand:SCALE")
    parser.add_argument("--folder", help="where it is stored; default: a temporary one")
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    parser.add_argument("--cache", default="64 MiB")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder = options.folder or temporary
        matrix = with_weights(graphs.load(options.graph, folder, symmetric=False))
        with (
            fw.Cache(options.cache, device=options.device) as cache,
            matrix.neighbours(cache=cache) as columns,
            matrix.weights(cache=cache) as values,
        ):
            y = multiply(matrix, columns, values, np.ones(matrix.vertices))
    print(f"{matrix.vertices} rows, {matrix.entries} entries; the sum of A 1 is {y.sum():.6g}")


if __name__ == "__main__":
    main()
