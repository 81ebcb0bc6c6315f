// Neighbour lists of a graph larger than memory: compressed sparse rows in an fw::array.
//
//   fw::graph::cached neighbours(array);
//   fw::graph::for_each(rows, neighbours, [&](uint64_t v) { return level_of[v] == level; },
//                       [&](uint64_t v, uint64_t i, uint32_t neighbour) { .. });
//
// Work is divided by entries, not by vertices: a warp takes a chunk of the array, at most one line,
// and finds the lists in it. So many warps share the list of a hub, one warp handles the short
// lists of a line, and only one warp asks for each line. All lanes of a warp call `for_each`
// together; `visit` may diverge.
#pragma once

#include "flashwarp/array.cuh"

namespace fw::graph {

// Where the lists are; the host fills this in. All but the entries themselves is in device memory.
struct rows {
  const uint64_t* offsets;  // vertices + 1: the list of v is [offsets[v], offsets[v + 1])
  const uint32_t* first;    // chunks + 1: the vertex whose list has the first entry of each chunk
  uint64_t vertices;
  uint64_t entries;
  uint64_t chunks;
  uint32_t chunk_log2;  // entries of a chunk
  uint32_t ahead;       // chunks that a thread of the CPU device prefetches
  uint32_t backwards;   // visit the last chunk first: after a forward pass, the lines that it left
                        // in the cache come first
  uint32_t reserved;
  const uint32_t* in_place;  // the entries, if the device may read them past the cache; else null
};
static_assert(sizeof(rows) == 64);

// The distance of a vertex to which there is no path.
inline constexpr uint32_t kUnreached = 0xffffffffu;

// Entries that a lane loads together, from lists that are long enough.
inline constexpr uint32_t kUnroll = 4;

// Sources of entries. All lanes call `begin_chunk` before the first list of a chunk. If the source
// `counts`, they pass how many entries of the chunk are wanted.

// Reads through the cache, line by line.
class cached {
 public:
  FW_DEVICE explicit cached(const array<const uint32_t>& a) : array_(a), cursor_(a) {}

  FW_DEVICE bool counts() const { return false; }
  // All lanes read, so that all of them copy the line. A short list is read by a few lanes only.
  FW_DEVICE void begin_chunk(uint64_t first, uint64_t) { cursor_[first]; }
  FW_DEVICE uint32_t load(uint64_t i) { return cursor_[i]; }
  FW_DEVICE void load_several(uint64_t i, uint32_t (&values)[kUnroll]) {
    cursor_.load(i, warp::kWarpWidth, values);
  }
  FW_DEVICE void prefetch(uint64_t i) { array_.prefetch(i); }

 private:
  const array<const uint32_t>& array_;
  cursor<const uint32_t> cursor_;
};

// Reads memory in place: the device's own, or pinned memory of the host.
class plain {
 public:
  FW_DEVICE explicit plain(const uint32_t* entries) : entries_(entries) {}

  FW_DEVICE bool counts() const { return false; }
  FW_DEVICE void begin_chunk(uint64_t, uint64_t) {}
  FW_DEVICE uint32_t load(uint64_t i) { return entries_[i]; }
  FW_DEVICE void load_several(uint64_t i, uint32_t (&values)[kUnroll]) {
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) values[k] = entries_[i + k * warp::kWarpWidth];
  }
  FW_DEVICE void prefetch(uint64_t) {}

 private:
  const uint32_t* entries_;
};

// Reads through the cache if the line is there or much of it is wanted, and otherwise directly from
// the storage in host memory: for a short list, a whole line costs the link more than it saves, and
// evicts a line that may be used again. If the storage cannot be read in place, this is `cached`.
class cached_or_in_place {
 public:
  // `entries` is the storage of an array on the in-place route that no thread writes.
  FW_DEVICE cached_or_in_place(const array<const uint32_t>& a, const uint32_t* entries,
                               uint64_t fill_from)
      : cached_(a), in_place_(entries), array_(a), fill_from_(fill_from) {}

  // Reads `r.in_place` past the cache unless half of a chunk is wanted.
  FW_DEVICE cached_or_in_place(const array<const uint32_t>& a, const rows& r)
      : cached_or_in_place(a, r.in_place,
                           r.in_place == nullptr ? 0 : uint64_t(1) << r.chunk_log2 >> 1) {}

  FW_DEVICE bool counts() const { return fill_from_ != 0; }
  FW_DEVICE void begin_chunk(uint64_t first, uint64_t wanted) {
    through_ = wanted >= fill_from_ || cache::probe(array_.geometry, array_.line_of(first)).found;
    if (through_) cached_.begin_chunk(first, wanted);
  }
  FW_DEVICE uint32_t load(uint64_t i) { return through_ ? cached_.load(i) : in_place_.load(i); }
  FW_DEVICE void load_several(uint64_t i, uint32_t (&values)[kUnroll]) {
    if (through_) {
      cached_.load_several(i, values);
    } else {
      in_place_.load_several(i, values);
    }
  }
  FW_DEVICE void prefetch(uint64_t i) {
    if (fill_from_ == 0) cached_.prefetch(i);
  }

 private:
  cached cached_;
  plain in_place_;
  const array<const uint32_t>& array_;
  uint64_t fill_from_;  // fill the line if this many entries of the chunk are wanted; 0: always
  bool through_ = true;
};

// The sum over all lanes of a warp. All lanes call together, and all get it.
template <typename T>
FW_DEVICE T sum_of_lanes(T value) {
  for (uint32_t step = warp::kWarpWidth / 2; step > 0; step /= 2) {
    value += lanes::all().take(value, warp::lane() ^ step);
  }
  return value;
}

namespace detail {

// The part of a list that lies in a chunk.
struct piece {
  uint64_t begin, end;
};

template <typename Wants>
FW_DEVICE piece piece_of(const rows& r, uint64_t v, uint64_t last, uint64_t first_entry,
                         uint64_t end_entry, Wants& wants) {
  if (v > last || !wants(v)) return {0, 0};
  const uint64_t begin = r.offsets[v], end = r.offsets[v + 1];
  return {begin < first_entry ? first_entry : begin, end < end_entry ? end : end_entry};
}

// The chunk at a place in the order of the launch.
FW_DEVICE uint64_t chunk_at(const rows& r, uint64_t place) {
  return r.backwards != 0 ? r.chunks - 1 - place : place;
}

FW_DEVICE uint64_t end_of(const rows& r, uint64_t chunk) {
  const uint64_t end = (chunk + 1) << r.chunk_log2;
  return end < r.entries ? end : r.entries;
}

// How many entries of a chunk are wanted. All lanes get the sum.
template <typename Wants>
FW_DEVICE uint64_t count_wanted(const rows& r, uint64_t chunk, Wants& wants) {
  const uint64_t last = r.first[chunk + 1];
  uint64_t count = 0;
  for (uint64_t v = r.first[chunk] + warp::lane(); v <= last; v += warp::kWarpWidth) {
    const piece p = piece_of(r, v, last, chunk << r.chunk_log2, end_of(r, chunk), wants);
    if (p.begin < p.end) count += p.end - p.begin;
  }
  return sum_of_lanes(count);
}

// Calls `visit` for the entries of a piece of the list of `v`, by all lanes.
template <typename Source, typename Visit>
FW_DEVICE void visit_piece(Source& source, uint64_t v, piece p, Visit& visit) {
  // Begin at a multiple of the warp's width, so that lanes that read side by side share sectors.
  uint64_t i = p.begin / warp::kWarpWidth * warp::kWarpWidth + warp::lane();
  if (i < p.end && i >= p.begin) visit(v, i, source.load(i));
  i += warp::kWarpWidth;
  constexpr uint64_t kRound = uint64_t(kUnroll) * warp::kWarpWidth;
  for (; i - warp::lane() + kRound <= p.end; i += kRound) {
    uint32_t values[kUnroll];
    source.load_several(i, values);
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) visit(v, i + k * warp::kWarpWidth, values[k]);
  }
  for (; i < p.end; i += warp::kWarpWidth) visit(v, i, source.load(i));
  if constexpr (requires { visit.finish(v); }) {
    lanes::all().sync();
    visit.finish(v);
  }
  lanes::all().sync();
}

template <typename Source, typename Wants, typename Visit>
FW_DEVICE void visit_chunk(const rows& r, uint64_t chunk, Source& source, Wants& wants,
                           Visit& visit) {
  const lanes here = lanes::all();
  const uint64_t last = r.first[chunk + 1];
  uint64_t wanted = 0;
  if (source.counts()) wanted = count_wanted(r, chunk, wants);
  bool begun = false;
  for (uint64_t base = r.first[chunk]; base <= last; base += warp::kWarpWidth) {
    const uint64_t v = base + warp::lane();
    const piece mine = piece_of(r, v, last, chunk << r.chunk_log2, end_of(r, chunk), wants);
    const lanes owners = here.ballot(mine.begin < mine.end);
    if (owners && !begun) {
      source.begin_chunk(chunk << r.chunk_log2, wanted);
      begun = true;
    }
    for (const uint32_t owner : owners) {
      const piece p = {here.broadcast(mine.begin, owner), here.broadcast(mine.end, owner)};
      visit_piece(source, base + owner, p, visit);
    }
  }
}

}  // namespace detail

// Calls visit(v, i, entry) once for each entry i of the list of each vertex v for which wants(v) is
// true. All warps of the launch call it together and divide the entries. If `visit` has finish(v),
// all lanes of a warp call that after a piece of the list of v. wants(v) must not change from true
// to false meanwhile.
template <typename Source, typename Wants, typename Visit>
FW_DEVICE void for_each(const rows& r, Source& source, Wants wants, Visit&& visit) {
  const uint64_t stride = warp::count();
  uint64_t asked = warp::index();  // the next place to look at for reading ahead
  for (uint64_t place = warp::index(); place < r.chunks; place += stride) {
    // On the CPU device there are too few threads to keep a disk busy without prefetches.
    if constexpr (warp::kWarpWidth == 1) {
      if (asked <= place) asked = place + stride;
      for (; r.ahead != 0 && asked < r.chunks && asked <= place + r.ahead * stride;
           asked += stride) {
        const uint64_t chunk = detail::chunk_at(r, asked);
        const bool wanted = detail::count_wanted(r, chunk, wants) != 0;
        if (wanted) source.prefetch(chunk << r.chunk_log2);
      }
    }
    detail::visit_chunk(r, detail::chunk_at(r, place), source, wants, visit);
  }
}

// One level of a breadth-first search, for `for_each`. `distances` has each vertex's level, or
// kUnreached. `found` is set if the next level has a vertex.
struct search_level {
  uint32_t* distances;
  uint32_t* found;
  uint64_t vertices;
  uint64_t level;

  FW_DEVICE bool wants(uint64_t v) const { return atomic::load_relaxed(&distances[v]) == level; }
  // Several warps may reach a vertex at once: all store the same level. A neighbour that is not a
  // vertex comes from a damaged file, and is skipped.
  FW_DEVICE void visit(uint64_t, uint32_t neighbour, bool& reached) const {
    if (neighbour >= vertices || atomic::load_relaxed(&distances[neighbour]) != kUnreached) return;
    atomic::store_relaxed(&distances[neighbour], uint32_t(level) + 1);
    reached = true;
  }
  FW_DEVICE void finish(bool reached) const {
    if (reached) atomic::store_relaxed(found, 1u);
  }
};
static_assert(sizeof(search_level) == 32);

// Expands all vertices of one level. All warps of the launch call it.
template <typename Source>
FW_DEVICE void search(const rows& r, Source& source, const search_level& s) {
  bool reached = false;
  for_each(
      r, source, [&](uint64_t v) { return s.wants(v); },
      [&](uint64_t v, uint64_t, uint32_t neighbour) { s.visit(v, neighbour, reached); });
  s.finish(reached);
}

}  // namespace fw::graph
