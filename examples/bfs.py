"""Breadth-first search on a graph larger than the cache.

    python examples/bfs.py --graph kron:20
    python examples/bfs.py --graph edges.txt --device cuda:0 --cache "2 GiB"

The lists of neighbours stay in a file and are read on demand, line by line. There is one launch for
each level: the kernel takes every vertex at this distance from the source, and marks those of its
neighbours that no level has reached. `flashwarp graph make --by-degree` makes a graph of which a
search reads less.
"""

import argparse
import tempfile

import numpy as np

import flashwarp as fw
from flashwarp import graphs

KERNEL = """
#include "flashwarp/graph.cuh"

FW_KERNEL search_level(const FW_GRID_CONSTANT fw::array<const uint32_t> neighbours,
                       const FW_GRID_CONSTANT fw::graph::rows rows, uint32_t* distances,
                       uint32_t* found, uint32_t level) {
  // Short lists are read in place if the storage is memory: they do not fill a line of the cache.
  fw::graph::cached_or_in_place lists(neighbours, rows);
  fw::graph::search(rows, lists, {distances, found, rows.vertices, level});
}
"""

UNREACHED = 0xFFFFFFFF


def search(graph, neighbours, source):
    """Return the distance of every vertex from `source`, UNREACHED where there is no path."""
    device = neighbours.device
    kernel = fw.compile(KERNEL, device)["search_level"]
    distances = np.full(graph.vertices, UNREACHED, np.uint32)
    distances[graph.vertex_of(source)] = 0
    with (
        graphs.Rows(graph, neighbours) as rows,
        device.allocate(distances.nbytes) as on_device,
        device.allocate(4) as found,
    ):
        device.upload(on_device.address, distances)
        for level in range(graph.vertices):
            device.fill(found.address, 0, 4)
            kernel(neighbours, rows.handle, on_device, found, level, warps=rows.chunks)
            neighbours.synchronize()  # waits; raises if a read failed
            if device.download(found.address, 4) == b"\0\0\0\0":
                break
            # The next level goes the other way, and begins with what this one left in the cache.
            rows.turn()
        device.download_into(on_device.address, distances)
    return graph.by_label(distances)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="kron:14", help="FILE, kron:SCALE or urand:SCALE")
    parser.add_argument("--folder", help="where the graph is made; default: a temporary one")
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    parser.add_argument("--cache", default="64 MiB")
    parser.add_argument("--source", type=int, help="default: some vertex with neighbours")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        graph = graphs.load(options.graph, options.folder or temporary)
        source = graph.pick_sources(1, seed=1)[0] if options.source is None else options.source
        with graph.neighbours(device=options.device, cache=options.cache) as neighbours:
            distances = search(graph, neighbours, source)
            read = neighbours.stats.bytes_read
    counts = np.bincount(distances[distances != UNREACHED])
    print(f"{graph.vertices} vertices, {graph.entries} entries, from vertex {source}")
    for distance, count in enumerate(counts):
        print(f"distance {distance}: {count} vertices")
    print(f"read {read / 2**20:.1f} MiB of {4 * graph.entries / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
