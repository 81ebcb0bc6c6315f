"""Connected components of a graph larger than the cache.

    python examples/connected_components.py --graph kron:20

Each vertex begins as its own tree. One pass over all lists joins the trees of the two ends of each
edge: the larger root goes below the smaller one. A second kernel then points each vertex to its
root. So the file is read once, from beginning to end (link and compress of Afforest).
"""

import argparse
import tempfile

import numpy as np

import flashwarp as fw
from flashwarp import graphs

KERNEL = """
#include "flashwarp/graph.cuh"

using namespace fw;

FW_DEVICE void link(uint32_t* parents, uint32_t a, uint32_t b) {
  a = atomic::load_relaxed(&parents[a]);
  b = atomic::load_relaxed(&parents[b]);
  while (a != b) {
    const uint32_t high = a > b ? a : b, low = a > b ? b : a;
    const uint32_t above = atomic::load_relaxed(&parents[high]);
    if (above == low) return;
    if (above == high && atomic::cas_acq_rel(&parents[high], high, low)) return;
    // Another thread joined `high` meanwhile, or it was not a root: go on from higher up.
    a = atomic::load_relaxed(&parents[atomic::load_relaxed(&parents[high])]);
    b = atomic::load_relaxed(&parents[low]);
  }
}

FW_KERNEL join(const FW_GRID_CONSTANT array<const uint32_t> neighbours,
               const FW_GRID_CONSTANT graph::rows rows, uint32_t* parents) {
  graph::cached lists(neighbours);
  graph::for_each(
      rows, lists, [](uint64_t) { return true; },
      [&](uint64_t v, uint64_t, uint32_t neighbour) {
        if (neighbour < rows.vertices) link(parents, uint32_t(v), neighbour);
      });
}

FW_KERNEL compress(uint32_t* parents, uint64_t vertices) {
  for (uint64_t v = base::thread_index(); v < vertices; v += base::thread_count()) {
    uint32_t root = atomic::load_relaxed(&parents[v]);
    for (uint32_t above; (above = atomic::load_relaxed(&parents[root])) != root;) root = above;
    atomic::store_relaxed(&parents[v], root);
  }
}
"""


def components(graph, neighbours):
    """Return the smallest vertex of the component of each vertex."""
    device = neighbours.device
    program = fw.compile(KERNEL, device)
    roots = np.arange(graph.vertices, dtype=np.uint32)
    with graphs.Rows(graph, neighbours) as rows, device.allocate(roots.nbytes) as parents:
        device.upload(parents.address, roots)
        program["join"](neighbours, rows.handle, parents, warps=rows.chunks)
        neighbours.synchronize()  # waits; raises if a read failed
        program["compress"](parents, graph.vertices, warps=-(-graph.vertices // 32))
        device.synchronize()
        device.download_into(parents.address, roots)
    return graph.smallest_labels(roots)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="kron:14", help="FILE, kron:SCALE or urand:SCALE")
    parser.add_argument("--folder", help="where the graph is made; default: a temporary one")
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    parser.add_argument("--cache", default="64 MiB")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        graph = graphs.load(options.graph, options.folder or temporary)
        with graph.neighbours(device=options.device, cache=options.cache) as neighbours:
            labels = components(graph, neighbours)
            read = neighbours.stats.bytes_read
    roots, sizes = np.unique(labels, return_counts=True)
    print(f"{graph.vertices} vertices, {graph.entries} entries")
    print(f"{len(roots)} components, the largest with {sizes.max()} vertices")
    print(f"read {read / 2**20:.1f} MiB of {4 * graph.entries / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
