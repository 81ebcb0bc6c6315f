// Breadth-first search, one level a launch, on a graph whose neighbour lists stay in storage.
//
// Every warp looks at tiles of vertices in the order of the file, so that lists that are read
// together lie together. In a tile, first every list of the frontier is asked for, then each is
// expanded by all lanes: the lists of a tile travel while the first ones are expanded.
#pragma once

#include "flashwarp/array.cuh"

namespace fw::kernels {

struct bfs_params {
  array<uint32_t> neighbours;  // CSR: the list of vertex v is [offsets[v], offsets[v + 1])
  const uint64_t* offsets;  // vertices + 1 entries, never decreasing, the last <= neighbours.size()
  uint32_t* distances;      // kUnreached, or the level at which the search met the vertex
  uint32_t* found;          // set to 1 when any vertex joins the next level
  uint64_t vertices;
  uint32_t level;  // of the frontier
  uint32_t tile;   // vertices that a warp takes at a time, a multiple of its width
};
static_assert(sizeof(bfs_params) == 112);

inline constexpr uint32_t kUnreached = 0xffffffffu;
// Lines of one list that are on their way while another is expanded: eight 4 KiB lines hide a
// disk's 100 us behind 8192 neighbours.
inline constexpr uint64_t kListLinesAhead = 8;

FW_DEVICE uint64_t neighbours_per_line(const bfs_params& p) {
  return cache::line_bytes(p.neighbours.geometry) / sizeof(uint32_t);
}

// Asks for the first lines of [begin, end); the rest follows while the list is expanded.
FW_DEVICE void prefetch_list(const bfs_params& p, uint64_t begin, uint64_t end) {
  const uint64_t span = neighbours_per_line(p);
  const uint64_t limit = begin + kListLinesAhead * span;
  for (uint64_t i = begin; i < end && i < limit; i = (i / span + 1) * span) {
    p.neighbours.prefetch(i);
  }
}

// Several warps may meet a vertex at once: all store the same level, so the last one wins nothing.
// A neighbour outside the graph comes from a damaged file and is passed over.
FW_DEVICE void meet(const bfs_params& p, uint32_t vertex, bool& found) {
  if (vertex >= p.vertices || atomic::load_relaxed(&p.distances[vertex]) != kUnreached) return;
  atomic::store_relaxed(&p.distances[vertex], p.level + 1);
  found = true;
}

// Meets the neighbours in [begin, end), with all lanes, line by line.
FW_DEVICE void expand_list(const bfs_params& p, cursor<uint32_t>& neighbours, uint64_t begin,
                           uint64_t end, bool& found) {
  const uint64_t span = neighbours_per_line(p);
  while (begin < end) {
    const uint64_t ahead = begin + kListLinesAhead * span;
    if (ahead < end && warp::lane() == 0) p.neighbours.prefetch(ahead);
    const uint64_t line_end = (begin / span + 1) * span;
    const uint64_t stop = end < line_end ? end : line_end;
    for (uint64_t i = begin + warp::lane(); i < stop; i += warp::kWarpWidth) {
      meet(p, neighbours[i], found);
    }
    begin = stop;
  }
}

FW_DEVICE bool in_frontier(const bfs_params& p, uint64_t vertex) {
  return vertex < p.vertices && atomic::load_relaxed(&p.distances[vertex]) == p.level;
}

FW_DEVICE void search_tile(const bfs_params& p, cursor<uint32_t>& neighbours, uint64_t first,
                           bool& found) {
  const uint32_t mask = warp::kFullMask;
  for (uint64_t v = first + warp::lane(); v < first + p.tile; v += warp::kWarpWidth) {
    if (in_frontier(p, v)) prefetch_list(p, p.offsets[v], p.offsets[v + 1]);
  }
  warp::sync(mask);
  for (uint64_t base = first; base < first + p.tile; base += warp::kWarpWidth) {
    const uint64_t v = base + warp::lane();
    const bool mine = in_frontier(p, v);
    const uint64_t begin = mine ? p.offsets[v] : 0;
    const uint64_t end = mine ? p.offsets[v + 1] : 0;
    for (uint32_t rest = warp::ballot(mask, mine); rest != 0; rest &= rest - 1) {
      const uint32_t owner = base::lowest_bit(rest);
      expand_list(p, neighbours, warp::broadcast(mask, begin, owner),
                  warp::broadcast(mask, end, owner), found);
      warp::sync(mask);
    }
  }
}

}  // namespace fw::kernels

FW_KERNEL_RESIDENT(4) fw_bfs_level(const FW_GRID_CONSTANT fw::kernels::bfs_params p) {
  using namespace fw;
  cursor<uint32_t> neighbours(p.neighbours);
  bool found = false;
  for (uint64_t first = uint64_t(warp::index()) * p.tile; first < p.vertices;
       first += uint64_t(warp::count()) * p.tile) {
    kernels::search_tile(p, neighbours, first, found);
  }
  if (found) atomic::store_relaxed(p.found, 1u);
}
