// Graph kernels for the benchmarks: one text for each algorithm, breadth-first search being that of
// flashwarp/graph.cuh, and ways to read the lists.
//
// cached, in_place: as an application has it (flashwarp/graph.cuh). plain: the same kernel on
// memory that the device reads in place. by_warp: a warp a vertex on such memory, as EMOGI reads
// pinned memory. naive, uncached: a thread a vertex, with an access or a command for each entry, as
// BaM's Figure 8 has them.
#include "flashwarp/graph.cuh"

#include "../bench.cuh"

namespace bench {

using namespace fw;

// The graph, and how to read it in place.
struct input {
  graph::rows rows;
  const uint32_t* entries;  // the lists where the device reads them in place, or null
  uint64_t fill_from;       // for `in_place`: entries wanted of a chunk that are worth a frame; 0:
                            // what `rows` says
};
static_assert(sizeof(input) == 80);

// Connected components: trees over vertices, joined edge by edge. A root points to itself, every
// other vertex to a smaller one, so the root of a finished tree is its smallest vertex. One launch
// takes the lists of the vertices from `begin` to `end`; between launches `cc_compress` flattens
// the trees. If two ends of an edge are in one flat tree, a comparison ends the visit. Without the
// launches between, all warps climb the same deep trees at once.
struct linking {
  uint32_t* parents;
  uint64_t vertices;
  uint64_t begin, end;

  FW_DEVICE bool wants(uint64_t v) const { return v >= begin && v < end; }
  FW_DEVICE void visit(uint64_t v, uint32_t neighbour, bool&) const {
    if (neighbour >= vertices) return;
    uint32_t a = atomic::load_relaxed(&parents[v]);
    uint32_t b = atomic::load_relaxed(&parents[neighbour]);
    while (a != b) {
      const uint32_t high = a > b ? a : b, low = a > b ? b : a;
      const uint32_t above = atomic::load_relaxed(&parents[high]);
      if (above == low) return;
      if (above == high && atomic::cas_acq_rel(&parents[high], high, low)) return;
      // Somebody joined `high` meanwhile, or it was no root: go on from higher up.
      a = atomic::load_relaxed(&parents[atomic::load_relaxed(&parents[high])]);
      b = atomic::load_relaxed(&parents[low]);
    }
  }
  FW_DEVICE void finish(bool) const {}
};

// The product of a sparse matrix with a vector. Vectors are memory of the device, and so are the
// values where the lists are.
struct product {
  const float* values;
  const float* x;
  float* y;
  uint64_t columns;
};

// One lane's part of a row.
template <typename Values>
struct sum_of_row {
  Values& values;
  const product& a;
  float sum = 0;

  FW_DEVICE void operator()(uint64_t, uint64_t i, uint32_t column) {
    if (column < a.columns) sum += values[i] * a.x[column];
  }
  // All lanes have seen their parts of a piece of the row.
  FW_DEVICE void finish(uint64_t row) {
    const float all = graph::sum_of_lanes(sum);
    if (warp::lane() == 0) atomic::add_relaxed(&a.y[row], all);
    sum = 0;
  }
};

// Loads an element by a command of its own, for the 512 bytes around it. On the direct route there
// is no buffer to name in it: not for that.
FW_DEVICE_NOINLINE uint32_t load_by_command(cache::line_cache* c, cache::volume* v, uint64_t byte) {
  const lanes here = fw::detail::active_on(v);
  nvme::queue_pair& q = cache::queue_of(*v, cache::take_seat(here));
  uint32_t value = 0;
  read_blocks(*c, *v, q, here, here, byte >> nvme::kLbaShift, 1, 0,
              [&](lanes, uint64_t address, bool good) {
                const uint64_t at = address + (byte & (nvme::kLbaBytes - 1));
                if (good) value = atomic::raw<4>::load_stream(reinterpret_cast<const char*>(at));
              });
  return value;
}

template <typename Algorithm, typename Source>
FW_DEVICE void by_chunk(const input& in, const Algorithm& a, Source source) {
  bool met = false;
  graph::for_each(
      in.rows, source, [&](uint64_t v) { return a.wants(v); },
      [&](uint64_t v, uint64_t, uint32_t neighbour) { a.visit(v, neighbour, met); });
  a.finish(met);
}

template <typename Algorithm, typename Load>
FW_DEVICE void by_thread(const graph::rows& r, const Algorithm& a, Load load) {
  bool met = false;
  for (uint64_t v = base::thread_index(); v < r.vertices; v += base::thread_count()) {
    if (!a.wants(v)) continue;
    for (uint64_t i = r.offsets[v]; i < r.offsets[v + 1]; i++) a.visit(v, load(i), met);
  }
  a.finish(met);
}

// The ways.

template <typename Algorithm>
FW_DEVICE void cached(const array<const uint32_t>& neighbours, const input& in,
                      const Algorithm& a) {
  by_chunk(in, a, graph::cached(neighbours));
}

template <typename Algorithm>
FW_DEVICE void in_place(const array<const uint32_t>& neighbours, const input& in,
                        const Algorithm& a) {
  using source = graph::cached_or_in_place;
  by_chunk(in, a,
           in.fill_from == 0 ? source(neighbours, in.rows)
                             : source(neighbours, in.entries, in.fill_from));
}

template <typename Algorithm>
FW_DEVICE void plain(const input& in, const Algorithm& a) {
  by_chunk(in, a, graph::plain(in.entries));
}

template <typename Source, typename Values>
FW_DEVICE void multiply(const input& in, const product& a, Source columns, Values values) {
  graph::for_each(in.rows, columns, [](uint64_t) { return true; }, sum_of_row<Values>{values, a});
}

template <typename Algorithm>
FW_DEVICE void by_warp(const input& in, const Algorithm& a) {
  const graph::rows& r = in.rows;
  bool met = false;
  for (uint64_t v = warp::index(); v < r.vertices; v += warp::count()) {
    if (!a.wants(v)) continue;
    const uint64_t begin = r.offsets[v], end = r.offsets[v + 1];
    // From a multiple of 128 bytes on, so that the requests of a warp are whole ones.
    for (uint64_t i = begin / 32 * 32 + warp::lane(); i < end; i += warp::kWarpWidth) {
      if (i >= begin) a.visit(v, in.entries[i], met);
    }
  }
  a.finish(met);
}

template <typename Algorithm>
FW_DEVICE void naive(const array<const uint32_t>& neighbours, const input& in, const Algorithm& a) {
  by_thread(in.rows, a, [&](uint64_t i) { return neighbours[i]; });
}

template <typename Algorithm>
FW_DEVICE void uncached(const array<const uint32_t>& neighbours, const input& in,
                        const Algorithm& a) {
  by_thread(in.rows, a, [&](uint64_t i) {
    return load_by_command(neighbours.cache, neighbours.volume, i * sizeof(uint32_t));
  });
}

}  // namespace bench

#define FW_GRAPH_KERNEL(NAME, ALGORITHM)                                             \
  FW_KERNEL_RESIDENT(4)                                                              \
  NAME([[maybe_unused]] const FW_GRID_CONSTANT fw::array<const uint32_t> neighbours, \
       const FW_GRID_CONSTANT bench::input in, const FW_GRID_CONSTANT ALGORITHM a)

FW_GRAPH_KERNEL(bfs_cached, fw::graph::search_level) { bench::cached(neighbours, in, a); }
FW_GRAPH_KERNEL(bfs_in_place, fw::graph::search_level) { bench::in_place(neighbours, in, a); }
FW_GRAPH_KERNEL(bfs_plain, fw::graph::search_level) { bench::plain(in, a); }
FW_GRAPH_KERNEL(bfs_by_warp, fw::graph::search_level) { bench::by_warp(in, a); }
FW_GRAPH_KERNEL(bfs_naive, fw::graph::search_level) { bench::naive(neighbours, in, a); }
FW_GRAPH_KERNEL(bfs_uncached, fw::graph::search_level) { bench::uncached(neighbours, in, a); }

FW_GRAPH_KERNEL(cc_cached, bench::linking) { bench::cached(neighbours, in, a); }
FW_GRAPH_KERNEL(cc_in_place, bench::linking) { bench::in_place(neighbours, in, a); }
FW_GRAPH_KERNEL(cc_plain, bench::linking) { bench::plain(in, a); }
FW_GRAPH_KERNEL(cc_by_warp, bench::linking) { bench::by_warp(in, a); }
FW_GRAPH_KERNEL(cc_naive, bench::linking) { bench::naive(neighbours, in, a); }
FW_GRAPH_KERNEL(cc_uncached, bench::linking) { bench::uncached(neighbours, in, a); }

#define FW_PRODUCT_KERNEL(NAME)                                                   \
  FW_KERNEL_RESIDENT(4)                                                           \
  NAME([[maybe_unused]] const FW_GRID_CONSTANT fw::array<const uint32_t> columns, \
       [[maybe_unused]] const FW_GRID_CONSTANT fw::array<const float> values,     \
       const FW_GRID_CONSTANT bench::input in, const FW_GRID_CONSTANT bench::product a)

FW_PRODUCT_KERNEL(spmv_cached) {
  bench::multiply(in, a, fw::graph::cached(columns), fw::cursor<const float>(values));
}
FW_PRODUCT_KERNEL(spmv_plain) { bench::multiply(in, a, fw::graph::plain(in.entries), a.values); }

// Every vertex is a tree of its own.
FW_KERNEL cc_begin(uint32_t* parents, uint64_t vertices) {
  using namespace fw;
  for (uint64_t v = base::thread_index(); v < vertices; v += base::thread_count()) {
    parents[v] = uint32_t(v);
  }
}

// Points every vertex to its root.
FW_KERNEL cc_compress(uint32_t* parents, uint64_t vertices) {
  using namespace fw;
  for (uint64_t v = base::thread_index(); v < vertices; v += base::thread_count()) {
    uint32_t root = atomic::load_relaxed(&parents[v]);
    for (uint32_t above; (above = atomic::load_relaxed(&parents[root])) != root;) root = above;
    atomic::store_relaxed(&parents[v], root);
  }
}
