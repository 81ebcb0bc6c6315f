"""Breadth-first search in Python: the kernel of bfs.py, written for numba-cuda.

    python examples/bfs_numba.py --graph kron:18

Needs a GPU and `pip install 'flashwarp[numba]'`. A warp takes a vertex, and its lanes take the
neighbours. In a long list, the warp prefetches the next line.
"""

import argparse
import tempfile

import numpy as np
from numba import cuda

from flashwarp import graphs
from flashwarp.interop.numba import jit, prefetch

UNREACHED = 0xFFFFFFFF
THREADS = 256
LANES = 32


@jit
def search_level(neighbours, offsets, distances, found, level):
    """Mark the neighbours of vertices at `level` that no level has reached."""
    lane = cuda.grid(1) % LANES
    for vertex in range(cuda.grid(1) // LANES, distances.size, cuda.gridsize(1) // LANES):
        if distances[vertex] != level:
            continue
        begin, end = offsets[vertex], offsets[vertex + 1]
        for i in range(begin + lane, end, LANES):
            if i + 1024 < end:
                prefetch(neighbours, i + 1024)
            other = neighbours[i]
            # A damaged file could name a vertex that does not exist. Several threads may store here
            # at once: all store the same value.
            if other < distances.size and distances[other] == UNREACHED:
                distances[other] = level + 1
                found[0] = 1


def search(graph, neighbours, source):
    """Return the distance of every vertex from `source`, UNREACHED where there is no path."""
    distances = np.full(graph.vertices, UNREACHED, np.uint32)
    distances[graph.vertex_of(source)] = 0
    distances = cuda.to_device(distances)
    offsets = cuda.to_device(graph.offsets)
    blocks = min(4096, -(-graph.vertices * LANES // THREADS))
    for level in range(graph.vertices):
        found = cuda.to_device(np.zeros(1, np.uint32))
        search_level[blocks, THREADS](neighbours, offsets, distances, found, np.uint32(level))
        neighbours.wait()  # waits; raises if a read failed
        if found.copy_to_host()[0] == 0:
            break
    return graph.by_label(distances.copy_to_host())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="kron:14", help="FILE, kron:SCALE or urand:SCALE")
    parser.add_argument("--folder", help="where the graph is made; default: a temporary one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", default="64 MiB")
    options = parser.parse_args()
    if options.device == "cpu":
        parser.error("numba-cuda compiles for GPUs: bfs.py is the same search for both devices")

    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        graph = graphs.load(options.graph, options.folder or temporary)
        source = graph.pick_sources(1, seed=1)[0]
        with graph.neighbours(device=options.device, cache=options.cache) as neighbours:
            distances = search(graph, neighbours, source)
    counts = np.bincount(distances[distances != UNREACHED])
    print(f"{graph.vertices} vertices, {graph.entries} entries, from vertex {source}")
    for distance, count in enumerate(counts):
        print(f"distance {distance}: {count} vertices")


if __name__ == "__main__":
    main()
