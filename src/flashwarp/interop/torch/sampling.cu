// Kernels of `flashwarp.torch.NeighborSampler`: a hop is sample_lists, rank_slots, a prefix sum of
// the ranks by torch, and number_vertices. write_edges follows when the host knows their number.
//
// All counts stay on the device: `nodes_end[h]` is the number of vertices after hop h, and
// `edges_end[h]` that of edges. Hop h samples the lists of the vertices that hop h - 1 has found.
#include "flashwarp/sampling.cuh"

#include "flashwarp/cache/miss_list.cuh"

using namespace fw;
using column = COLUMN;
using offset = OFFSET;

// The vertices that the hop before has found.
struct frontier {
  int64_t begin, end;

  FW_DEVICE frontier(const int64_t* nodes_end, uint32_t hop)
      : begin(hop == 1 ? 0 : nodes_end[hop - 2]), end(nodes_end[hop - 1]) {}
  FW_DEVICE uint64_t slots(uint32_t fanout) const { return uint64_t(end - begin) * fanout; }
};

// `in_place`: the entries, if the device is to read them past the cache; else null.
FW_DEVICE uint64_t entry_of(const array<const column>& entries, const column* in_place,
                            uint64_t i) {
  if (in_place == nullptr) return uint64_t(entries[i]);
  return i < entries.length ? uint64_t(in_place[i]) : uint64_t(entries.refuse(i));
}

FW_KERNEL enter_seeds(const int64_t* nodes, uint32_t seeds, uint64_t vertices, int64_t* keys,
                      int32_t* first, uint64_t mask) {
  const graph::vertex_table table = {reinterpret_cast<uint64_t*>(keys),
                                     reinterpret_cast<uint32_t*>(first), nullptr, mask};
  for (uint32_t s = base::thread_index(); s < seeds; s += base::thread_count()) {
    const uint64_t vertex = uint64_t(nodes[s]);
    // If it is none, sample_lists notes that.
    if (vertex < vertices) table.enter(vertex, s);
  }
}

// Whether a load of element `i` would wait for its line.
template <typename T>
FW_DEVICE bool is_absent(const array<const T>& a, uint64_t i) {
  return i < a.length && !cache::probe(a.geometry, a.line_of(i)).found;
}

// Fills the slots of a hop: `found` has the vertex of each, or -1, `places` where the table has it,
// and `edges`, unless it is null, which entry of the lists it is. A neighbour that is no vertex
// comes from a damaged file, and is skipped. If `drains` is not 0, lists that would wait for
// storage go to as many blocks, by `misses` and the number `launch`: see cache/miss_list.cuh.
FW_KERNEL sample_lists(const FW_GRID_CONSTANT array<const offset> offsets,
                       const FW_GRID_CONSTANT array<const column> entries, uint64_t in_place,
                       const int64_t* nodes, const int64_t* nodes_end, uint32_t hop,
                       uint32_t fanout, uint64_t seed, uint64_t draw, uint32_t first_slot,
                       int64_t* found, int64_t* edges, int32_t* places, int64_t* keys,
                       int32_t* first, uint64_t mask, uint64_t misses, uint64_t launch,
                       uint32_t drains) {
  const graph::vertex_table table = {reinterpret_cast<uint64_t*>(keys),
                                     reinterpret_cast<uint32_t*>(first), nullptr, mask};
  const uint64_t vertices = offsets.length - 1;
  const frontier here(nodes_end, hop);
  const uint64_t count = uint64_t(here.end - here.begin);
  const cache::list_use use = {reinterpret_cast<cache::miss_list*>(misses), launch, drains, 1};
  cache::deferred_items left(use, (drains + 3) / 4);
  bool entered = false;
  for (uint64_t next = warp::index();; next += warp::count()) {
    uint64_t at = next;
    // The warp's own lists come first, then those that its block takes.
    const bool own = at < count;
    if (!own) {
      uint32_t taken = 0;
      if (drains == 0 || left.next(*entries.volume, entered, taken) == 0) break;
      at = lanes::all().broadcast(taken, 0);
    }
    const bool may_leave = own && drains != 0;
    const uint64_t vertex = uint64_t(nodes[here.begin + int64_t(at)]);
    // The last offset ends a list and begins none.
    const bool known = vertex < vertices;
    if (may_leave && known) {
      // Lanes that look for one line may see it come or go.
      const bool absent = is_absent(offsets, vertex) || is_absent(offsets, vertex + 1);
      if (lanes::all().any(absent) && append(use, lanes::of(0), at, entered)) continue;
    }
    const uint64_t begin = known ? uint64_t(offsets[vertex]) : offsets.refuse(vertex);
    const uint64_t end = known ? uint64_t(offsets[vertex + 1]) : 0;
    const uint64_t slot = at * fanout;
    const uint32_t chosen = graph::choose(end > begin ? end - begin : 0, fanout,
                                          graph::random_stream(seed, draw, vertex), found + slot);
    if (may_leave && in_place == 0) {
      bool absent = false;
      for (uint64_t k = warp::lane(); k < chosen; k += warp::kWarpWidth) {
        absent |= is_absent(entries, begin + uint64_t(found[slot + k]));
      }
      if (lanes::all().any(absent) && append(use, lanes::of(0), at, entered)) continue;
    }
    for (uint64_t k = warp::lane(); k < fanout; k += warp::kWarpWidth) {
      uint64_t neighbour = vertices;
      if (k < chosen) {
        const uint64_t entry = begin + uint64_t(found[slot + k]);
        neighbour = entry_of(entries, reinterpret_cast<const column*>(in_place), entry);
        if (edges != nullptr) edges[slot + k] = int64_t(entry);
      }
      const bool counts = neighbour < vertices;
      found[slot + k] = counts ? int64_t(neighbour) : -1;
      if (counts)
        places[slot + k] = int32_t(table.enter(neighbour, uint32_t(first_slot + slot + k)));
    }
    warp::sync(warp::kFullMask);
  }
}

// One for each slot that is the first of its vertex, and 2^32 for each that has one. The sums of
// both fit 32 bits.
FW_KERNEL rank_slots(const int64_t* nodes_end, uint32_t hop, uint32_t fanout, uint32_t first_slot,
                     const int64_t* found, const int32_t* places, const int32_t* first,
                     int64_t* ranks) {
  const uint64_t slots = frontier(nodes_end, hop).slots(fanout);
  for (uint64_t s = base::thread_index(); s < slots; s += base::thread_count()) {
    int64_t rank = 0;
    if (found[s] >= 0) {
      rank = int64_t(1) << 32 |
             int64_t(uint32_t(first[uint32_t(places[s])]) == uint32_t(first_slot + s));
    }
    ranks[s] = rank;
  }
}

// Appends the new vertices to `nodes`. `ranks` has the sums up to and with each slot.
FW_KERNEL number_vertices(int64_t* nodes_end, int64_t* edges_end, uint32_t hop, uint32_t fanout,
                          uint32_t first_slot, const int64_t* found, const int32_t* places,
                          const int32_t* first, const int64_t* ranks, int32_t* number,
                          int64_t* nodes) {
  const frontier here(nodes_end, hop);
  const uint64_t slots = here.slots(fanout);
  for (uint64_t s = base::thread_index(); s < slots; s += base::thread_count()) {
    const uint32_t place = uint32_t(places[s]);
    if (found[s] < 0 || uint32_t(first[place]) != uint32_t(first_slot + s)) continue;
    const int64_t mine = here.end + int64_t(uint32_t(ranks[s])) - 1;
    number[place] = int32_t(mine);
    nodes[mine] = found[s];
  }
  if (base::thread_index() == 0) {
    const int64_t sums = slots == 0 ? 0 : ranks[slots - 1];
    nodes_end[hop] = here.end + int64_t(uint32_t(sums));
    edges_end[hop] = edges_end[hop - 1] + (sums >> 32);
  }
}

// Writes an edge for each slot that has a vertex: from its number to that of the list's vertex.
FW_KERNEL write_edges(const int64_t* nodes_end, const int64_t* edges_end, uint32_t hop,
                      uint32_t fanout, uint32_t seeds, const int64_t* found, const int32_t* places,
                      const int32_t* first, const int32_t* number, const int64_t* ranks,
                      const int64_t* edges, int64_t* sources, int64_t* targets, int64_t* ids) {
  const graph::vertex_table table = {nullptr,
                                     reinterpret_cast<uint32_t*>(const_cast<int32_t*>(first)),
                                     reinterpret_cast<uint32_t*>(const_cast<int32_t*>(number)), 0};
  const frontier here(nodes_end, hop);
  const uint64_t slots = here.slots(fanout);
  for (uint64_t s = base::thread_index(); s < slots; s += base::thread_count()) {
    if (found[s] < 0) continue;
    const int64_t edge = edges_end[hop - 1] + (ranks[s] >> 32) - 1;
    sources[edge] = int64_t(table.number_at(uint32_t(places[s]), seeds));
    targets[edge] = here.begin + int64_t(s / fanout);
    if (ids != nullptr) ids[edge] = edges[s];
  }
}
