// Rows and their segments, one for each line that a row touches: where they lie, and their copies.
#pragma once

#include "flashwarp/array.cuh"
#include "flashwarp/cache/miss_list.cuh"
#include "flashwarp/cache/short_hit.cuh"

namespace fw::kernels {

struct row_params {
  cache::geometry geometry;  // the cache's
  cache::line_cache* cache;
  cache::volume* volume;
  const void* indices;   // int64 or int32; null: a contiguous range
  uint64_t index_count;  // rows asked for; or bytes of the range
  char* rows;            // the caller's buffer: rows back to back
  uint64_t row_bytes;    // of one row; for a range: byte offset of its start in the array
  uint64_t row_count;    // rows of the array; or where the rows that indices count end in it
  uint64_t from_front;   // the row of index 0
  uint64_t from_end;     // what makes a negative index a row; 0: it is out of bounds
  uint64_t look_ahead;   // items that a warp prefetches ahead; 0: none
  uint32_t* strays;      // counts indices out of bounds, if a scatter depends on that; or null
  uint32_t index_bytes;  // 4 or 8
  uint32_t segments;     // the most lines that one row touches
  uint32_t bundle;       // segments that a warp takes at a time, 1 to 32; one if lines are long
  uint32_t reserved;
  cache::list_use misses;  // where the launch lists its misses
};
static_assert(sizeof(row_params) == 168);

FW_DEVICE int64_t index_at(const row_params& p, uint64_t k) {
  return p.index_bytes == 4 ? int64_t(static_cast<const int32_t*>(p.indices)[k])
                            : static_cast<const int64_t*>(p.indices)[k];
}

// The array's row of the caller's index `k`; row_count or more if the index is out of bounds.
FW_DEVICE uint64_t row_of(const row_params& p, uint64_t k) {
  const int64_t i = index_at(p, k);
  return uint64_t(i) + (i < 0 ? p.from_end : p.from_front);
}

// Notes that index `k` is out of bounds, for the host to raise.
FW_DEVICE_NOINLINE void note_stray(const row_params& p, uint64_t k) {
  cache::volume& v = *p.volume;
  // The rows of a table begin at `from_front`.
  cache::note_failure(v.indices, v.errors->indices, uint64_t(index_at(p, k)), cache::kRows, 0,
                      p.row_count - p.from_front);
}

// Whether the launch may store. A check of all indices runs before it in the same stream.
FW_DEVICE bool may_store(const row_params& p) {
  return p.strays == nullptr || atomic::load_relaxed(p.strays) == 0;
}

// The piece of a row in one line.
using segment = cache::piece;

// The line of a segment whose index is out of bounds.
inline constexpr uint64_t kNoRow = ~uint64_t(0);

// The piece of [begin, begin + bytes) of the array in its `part`-th line, for a buffer at `buffer`.
// `line_begin` is the volume's, which callers load once, beside the index.
FW_DEVICE segment cut(const row_params& p, uint64_t line_begin, uint64_t begin, uint64_t bytes,
                      uint64_t part, uint64_t buffer) {
  const uint32_t shift = p.geometry.line_shift;
  const uint64_t line = (begin >> shift) + part;
  const uint64_t from = part == 0 ? begin : line << shift;
  const uint64_t line_end = (line + 1) << shift;
  const uint64_t end = begin + bytes < line_end ? begin + bytes : line_end;
  if (from >= end) return {0, 0, 0, 0};
  return {line_begin + line, from - ((from >> shift) << shift), end - from,
          buffer + (from - begin)};
}

FW_DEVICE uint64_t segment_count(const row_params& p) {
  if (p.indices != nullptr) return p.index_count * p.segments;
  if (p.index_count == 0) return 0;
  const uint32_t shift = p.geometry.line_shift;
  return ((p.row_bytes + p.index_count - 1) >> shift) - (p.row_bytes >> shift) + 1;
}

// The row of which an item is a segment; row_count or more if its index is out of bounds.
FW_DEVICE uint64_t row_of_item(const row_params& p, uint64_t item) {
  if (p.indices == nullptr) return 0;
  return row_of(p, p.segments == 1 ? item : item / p.segments);
}

// The item's segment. `row` is its row_of_item.
FW_DEVICE segment segment_of(const row_params& p, uint64_t line_begin, uint64_t item,
                             uint64_t row) {
  const uint64_t buffer = reinterpret_cast<uint64_t>(p.rows);
  if (p.indices == nullptr) return cut(p, line_begin, p.row_bytes, p.index_count, item, buffer);
  if (row >= p.row_count) return {kNoRow, 0, 0, 0};
  const uint64_t k = p.segments == 1 ? item : item / p.segments;
  return cut(p, line_begin, row * p.row_bytes, p.row_bytes, item - k * p.segments,
             buffer + k * p.row_bytes);
}
FW_DEVICE segment segment_at(const row_params& p, uint64_t line_begin, uint64_t item) {
  return segment_of(p, line_begin, item, row_of_item(p, item));
}

// Copies each lane's segment between its frame and the caller's buffer, with the whole warp.
template <bool kToFrame>
struct copy_segments {
  static constexpr bool kStores = kToFrame;
  segment piece;

  FW_DEVICE cache::line_part stored() const { return {piece.offset, piece.bytes}; }

  // Copies rows of up to one word for each lane. Each lane loads its word of eight rows before it
  // stores the first, so several rows are in flight. Returns false, and copies nothing, if not all
  // members' pieces are such rows.
  template <warp::source kFrom>
  FW_DEVICE bool copy_short(lanes here, lanes members, uint64_t inside) {
    constexpr uint64_t kWordBytes = 16;
    constexpr uint32_t kRows = 8;
    const bool mine = members.mine();
    const uint64_t bytes = here.broadcast(piece.bytes, members.leader());
    const bool fits = piece.bytes == bytes && (inside | piece.buffer | bytes) % kWordBytes == 0;
    if (bytes > kWordBytes * warp::kWarpWidth || here.any(mine && !fits)) return false;
    const uint64_t word = warp::lane() * kWordBytes;
    lanes rest = members;
    while (rest) {
      atomic::word16 values[kRows];
      uint64_t targets[kRows];
      FW_UNROLL
      for (uint32_t r = 0; r < kRows; r++) {
        // Past the last row, copy the last one again: cheaper than a condition on each load.
        const uint32_t source = rest.leader();
        const lanes after = rest - rest.first();
        if (after || r == kRows - 1) rest = after;
        const uint64_t there = here.broadcast(inside, source);
        targets[r] = here.broadcast(piece.buffer, source) + word;
        const uint64_t from = word < bytes ? there + word : there;
        values[r] = warp::load_word<16, kFrom>(reinterpret_cast<const char*>(from));
      }
      if (word < bytes) {
        FW_UNROLL
        for (uint32_t r = 0; r < kRows; r++) {
          atomic::raw<16>::store_plain(reinterpret_cast<char*>(targets[r]), values[r]);
        }
      }
    }
    return true;
  }

  FW_DEVICE void visit(lanes here, lanes members, uint64_t frame) {
    const uint64_t inside = frame + piece.offset;
    // Each lane has acquired its own line; now all lanes copy all of them.
    here.sync();
    copy<kToFrame ? warp::source::kStream : warp::source::kFrame>(here, members, inside);
  }

  // Copies the members' segments, which begin at `inside` of each.
  template <warp::source kFrom>
  FW_DEVICE void copy(lanes here, lanes members, uint64_t inside) {
    if constexpr (!kToFrame && warp::kWarpWidth > 1) {
      if (copy_short<kFrom>(here, members, inside)) return;
    }
    warp::copy_each<kFrom>(here, members, kToFrame ? inside : piece.buffer,
                           kToFrame ? piece.buffer : inside, piece.bytes);
  }
};

// Whether warps prefetch what they will need. A GPU has enough warps, and its host asks for none.
inline constexpr bool kLooksAhead = !FW_ON_GPU;

// Adds a warp's events to the volume's. Each lane has its own bytes; events are counted by warp.
FW_DEVICE void add_events(cache::volume& v, lanes here, cache::tally& tally,
                          const cache::tally& ahead) {
  if (tally.bytes_used != 0) {
    atomic::add_relaxed(&cache::shard_of(v).bytes_used, tally.bytes_used);
    tally.bytes_used = 0;
  }
  tally.count_ahead(ahead);
  tally.add_to(v, here);
}

}  // namespace fw::kernels
