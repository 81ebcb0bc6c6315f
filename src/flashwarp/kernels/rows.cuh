// Gather, scatter and prefetch of rows of any width, and of contiguous ranges.
//
// A row is divided into segments, one for each line that it touches. A warp takes up to 32 segments
// at a time, one for each lane. It probes them together, fetches the missing lines with one batch
// of commands, and copies each segment with all lanes (`*_rows`). For rows of a few elements, each
// lane takes one element instead (`*_elements_N`, N the element's bytes). Every kernel takes one
// struct by value, which the host mirrors.
//
// If storage makes warps wait, a large launch defers its misses: see cache/miss_list.cuh. It holds
// all multiprocessors only as long as it serves hits.
#pragma once

#include "builds.cuh"
#include "flashwarp/array.cuh"
#include "flashwarp/cache/miss_list.cuh"
#include "flashwarp/cache/short_hit.cuh"
#include "flashwarp/cache/short_miss.cuh"

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
  uint32_t batch;        // segments that a warp takes at a time, 1 to 32; one if lines are long
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

  // Copies rows of up to one word for each lane. Each lane loads its word of eight rows before it
  // stores the first, so several rows are in flight. Returns false, and copies nothing, if not all
  // members' pieces are such rows.
  template <warp::source kFrom>
  FW_DEVICE bool copy_short(uint32_t mask, uint32_t members, uint64_t inside) {
    constexpr uint64_t kWordBytes = 16;
    constexpr uint32_t kRows = 8;
    const bool mine = (members >> warp::lane()) & 1;
    const uint64_t bytes = warp::broadcast(mask, piece.bytes, base::lowest_bit(members));
    const bool fits = piece.bytes == bytes && (inside | piece.buffer | bytes) % kWordBytes == 0;
    if (bytes > kWordBytes * warp::kWarpWidth || warp::any(mask, mine && !fits)) return false;
    const uint64_t word = warp::lane() * kWordBytes;
    uint32_t rest = members;
    while (rest != 0) {
      atomic::word16 values[kRows];
      uint64_t targets[kRows];
      FW_UNROLL
      for (uint32_t r = 0; r < kRows; r++) {
        // Past the last row, copy the last one again: cheaper than a condition on each load.
        const uint32_t source = base::lowest_bit(rest);
        if ((rest & (rest - 1)) != 0)
          rest &= rest - 1;
        else if (r == kRows - 1)
          rest = 0;
        const uint64_t there = warp::broadcast(mask, inside, source);
        targets[r] = warp::broadcast(mask, piece.buffer, source) + word;
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

  FW_DEVICE void visit(uint32_t mask, uint32_t members, uint64_t frame) {
    const uint64_t inside = frame + piece.offset;
    // Each lane has acquired its own line; now all lanes copy all of them.
    warp::sync(mask);
    copy<kToFrame ? warp::source::kStream : warp::source::kFrame>(mask, members, inside);
  }

  // Copies the members' segments, which begin at `inside` of each.
  template <warp::source kFrom>
  FW_DEVICE void copy(uint32_t mask, uint32_t members, uint64_t inside) {
    if constexpr (!kToFrame && warp::kWarpWidth > 1) {
      if (copy_short<kFrom>(mask, members, inside)) return;
    }
    warp::copy_each<kFrom>(mask, members, kToFrame ? inside : piece.buffer,
                           kToFrame ? piece.buffer : inside, piece.bytes);
  }
};

// Whether warps prefetch what they will need. A GPU has enough warps, and its host asks for none.
inline constexpr bool kLooksAhead = !FW_ON_GPU;

// Adds a warp's events to the volume's. Each lane has its own bytes; events are counted by warp.
FW_DEVICE void add_events(cache::volume& v, uint32_t mask, cache::tally& tally,
                          const cache::tally& ahead) {
  if (tally.bytes_used != 0) {
    atomic::add_relaxed(&cache::shard_of(v).bytes_used, tally.bytes_used);
    tally.bytes_used = 0;
  }
  tally.count_ahead(ahead);
  tally.add_to(v, mask);
}

// What a launch of rows does with its segments.
enum class row_action { kGather, kScatter, kPrefetch };

// Notes an index out of bounds, at the first of its row's segments. A gather puts zeros in its row.
template <row_action kAction>
FW_DEVICE_NOINLINE void refuse_row(const row_params& p, uint64_t item) {
  const uint64_t k = item / p.segments;
  if (k * p.segments != item) return;
  if constexpr (kAction == row_action::kGather) {
    char* const target = p.rows + k * p.row_bytes;
    for (uint64_t i = 0; i < p.row_bytes; i++) atomic::store_plain(target + i, char(0));
  }
  note_stray(p, k);
}

// The segments that a warp takes at a time.
FW_DEVICE uint32_t batch_of(const row_params& p) {
  return p.batch < warp::kWarpWidth ? p.batch : warp::kWarpWidth;
}

// Takes one segment from the words of its line, on the short way of a miss.
struct take_segment {
  static constexpr bool kTakesWords = true;
  segment piece;

  FW_DEVICE void begin(uint64_t) {}
  FW_DEVICE void word(uint64_t at, const atomic::word16& value) {
    const uint64_t inside = at - piece.offset;
    if (inside >= piece.bytes) return;
    atomic::raw<16>::store_plain(reinterpret_cast<char*>(piece.buffer + inside), value);
  }
};

// Fetches the line of one segment and copies the segment while the line passes. Returns false if
// `for_each_segment` must do it.
FW_DEVICE_NOINLINE bool gather_absent(cache::geometry g, cache::line_cache* c, cache::volume* v,
                                      segment piece) {
  const uint32_t mask = warp::kFullMask;
  if (piece.bytes == 0 || (piece.offset | piece.buffer | piece.bytes) % 16 != 0) return false;
  cache::counters& shard = cache::shard_of(*v);
  const cache::short_way way = cache::short_way_of(*c, *v);
  take_segment take = {piece};
  if (!cache::serve_short<policy, false>(g, *c, way, shard, mask, piece.line, take)) return false;
  if (warp::lane() == 0) atomic::add_relaxed(&shard.bytes_used, piece.bytes);
  return true;
}

// Gathers the warp's segments, one after the other, until one is neither resident nor fetched on
// the short way. Takes those that it has gathered out of `mine`. A call for a few rows does nothing
// else, so this way is short: the instructions of a kernel that has just started are in no cache.
FW_DEVICE void gather_residents(const row_params& p, warp::share& mine) {
  const cache::volume& v = *p.volume;
  uint64_t hits = 0;
  uint64_t bytes = 0;
  // The loads of the first index and of the volume do not wait for each other.
  uint64_t row = mine.begin < mine.end ? row_of_item(p, mine.begin) : 0;
  const uint64_t line_begin = v.line_begin;
  cache::counters& shard = cache::shard_of(v);
  const uint32_t epoch = cache::epoch_of(v);
  while (mine.begin < mine.end) {
    const segment piece = segment_of(p, line_begin, mine.begin, row);
    if (cache::is_held(piece) && cache::copy_resident<policy>(p.geometry, piece, epoch)) {
      hits++;
      bytes += piece.bytes;
    } else if (warp::any(warp::kFullMask, epoch != 0) ||
               !gather_absent(p.geometry, p.cache, p.volume, piece)) {
      break;
    }
    mine.begin += mine.stride;
    if (mine.begin < mine.end) row = row_of_item(p, mine.begin);
  }
  if (warp::lane() == 0 && hits != 0) {
    atomic::add_relaxed(&shard.hits, hits);
    atomic::add_relaxed(&shard.bytes_used, bytes);
  }
}

// The bytes of all rows, or of the range.
FW_DEVICE uint64_t bytes_asked_for(const row_params& p) {
  return p.indices != nullptr ? p.index_count * p.row_bytes : p.index_count;
}

// What a thread of the CPU device takes of a launch at a time.
inline constexpr uint64_t kTakenBytes = 64 << 10;

// Gathers segments with one thread of the CPU device: in batches what needs no wait, then the rest.
// While the storage makes it wait, the thread takes one segment at a time, and prefetches others.
template <typename Policy>
FW_DEVICE void gather_by_thread(const row_params& p) {
  using reader = cache::piece_reader<Policy>;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint32_t mask = warp::kFullMask;
  const uint32_t batch = p.batch < reader::kBatch ? p.batch : reader::kBatch;
  const uint64_t line = cache::line_bytes(p.geometry);
  const uint64_t piece_bytes = p.indices != nullptr && p.row_bytes < line ? p.row_bytes : line;
  const uint64_t segments = segment_count(p);
  warp::item_loop loop(segments, (kTakenBytes / piece_bytes / batch + 1) * batch);
  cache::tally tally;
  cache::tally ahead;
  reader pieces_of(p.geometry, v, cache::around_for(p.geometry, segments, bytes_asked_for(p)));
  const uint64_t line_begin = v.line_begin;
  cache::refresh(c, v, mask);
  // Segments in a row that needed neither a wait nor a prefetch.
  uint64_t quiet = 0;
  uint64_t first = 0;
  uint64_t end = 0;
  while (first < end || loop.next(first, end)) {
    segment pieces[reader::kBatch];
    const bool waits = quiet < p.look_ahead;
    const uint32_t most = waits ? 1 : batch;
    const uint32_t count = end - first < most ? uint32_t(end - first) : most;
    for (uint32_t i = 0; i < count; i++) {
      pieces[i] = segment_at(p, line_begin, first + i);
      if (pieces[i].line == kNoRow) refuse_row<row_action::kGather>(p, first + i);
      tally.bytes_used += pieces[i].bytes;
    }
    const uint32_t asked = ahead.misses;
    if (waits && first + p.look_ahead < loop.part_end()) {
      const segment next = segment_at(p, line_begin, first + p.look_ahead);
      const bool asks = next.bytes != 0 && !pieces_of.is_in_memory(next);
      cache::prefetch<Policy>(c, v, mask, asks, next.line, ahead);
    }
    const uint32_t misses = tally.misses;
    bool waited = ahead.misses != asked;
    for (uint32_t rest = pieces_of.read(pieces, count, tally); rest != 0; rest &= rest - 1) {
      const segment& piece = pieces[base::lowest_bit(rest)];
      waited = waited || !pieces_of.is_in_memory(piece);
      copy_segments<false> op = {piece};
      cache::access<Policy>(p.geometry, c, v, mask, true, piece.line, false, op, tally);
    }
    // If the page cache had a row that missed, it probably has the next ones too.
    const bool cached = tally.misses != misses;
    quiet = waited ? 0 : cached ? p.look_ahead : quiet + count;
    first += count;
  }
  pieces_of.add_bypasses();
  add_events(v, mask, tally, ahead);
}

// Moves or prefetches one segment for each lane; of 0 bytes: nothing.
template <row_action kAction, typename Misses>
FW_DEVICE void serve_segments(const row_params& p, const segment& piece, const Misses& misses,
                              cache::tally& tally) {
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint32_t mask = warp::kFullMask;
  const bool wants = piece.bytes != 0;
  if constexpr (kAction == row_action::kPrefetch) {
    if (misses.allowed()) {
      bool busy = false;
      const bool absent = wants && !cache::probe(p.geometry, piece.line, busy).found && !busy;
      const uint32_t missing = warp::ballot(mask, absent);
      if (missing == 0 || misses.defer(missing)) return;
    }
    cache::prefetch<policy>(c, v, mask, wants, piece.line, tally);
  } else {
    const bool whole = kAction == row_action::kScatter && wants &&
                       piece.bytes == cache::bytes_of_line(c, v, piece.line);
    copy_segments<kAction == row_action::kScatter> op = {piece};
    const uint32_t status =
        cache::access<policy>(p.geometry, c, v, mask, wants, piece.line, whole, op, tally, misses);
    if (wants && status != cache::kDeferred) tally.bytes_used += piece.bytes;
  }
}

// Fetches the deferred segments. A function of its own, so that the loop over hits keeps its
// registers.
template <row_action kAction>
FW_DEVICE_NOINLINE void drain_segments(const row_params& p, bool entered) {
  cache::volume& v = *p.volume;
  cache::tally tally;
  const uint32_t multiprocessors = (p.misses.blocks + 1) / 2;
  cache::end_deferring(p.misses, v, multiprocessors, entered, [&](uint32_t item, bool active) {
    segment piece = {0, 0, 0, 0};
    if (active) piece = segment_at(p, v.line_begin, item);
    const cache::fetch_misses misses;
    serve_segments<kAction>(p, piece, misses, tally);
  });
  add_events(v, warp::kFullMask, tally, {});
}

// Moves the warp's segments, a batch at a time. `entered` says whether it has deferred some.
template <row_action kAction>
FW_DEVICE void for_each_segment(const row_params& p, const warp::share& mine, bool& entered) {
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint64_t line_begin = v.line_begin;
  const uint32_t mask = warp::kFullMask;
  const bool in_batch = warp::lane() < batch_of(p);
  cache::tally tally;
  cache::tally ahead;
  cache::refresh(c, v, mask);
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    const uint64_t item = first + warp::lane();
    segment piece = {0, 0, 0, 0};
    if (in_batch && item < mine.end) piece = segment_at(p, line_begin, item);
    if (piece.line == kNoRow) refuse_row<kAction>(p, item);
    if (kAction != row_action::kPrefetch && kLooksAhead && p.look_ahead != 0) {
      const uint64_t later = item + p.look_ahead * mine.stride;
      segment next = {0, 0, 0, 0};
      if (in_batch && later < mine.end) next = segment_at(p, line_begin, later);
      base::opaque (&cache::prefetch<policy>)(c, v, mask, next.bytes != 0, next.line, ahead);
    }
    const cache::deferral misses = {p.misses, entered, item};
    serve_segments<kAction>(p, piece, misses, tally);
  }
  add_events(v, mask, tally, ahead);
}

// Copies the segments of absent lines from where the namespace is read in place to the caller's
// buffer, and fills no frame. Returns the lanes it has served; `access` must serve the others. What
// was stored before the look is in the namespace if the line is absent. What is stored later may or
// may not be seen, as by every gather beside it.
FW_DEVICE uint32_t gather_around(const row_params& p, const cache::short_way& way,
                                 const segment& piece) {
  const cache::geometry& g = p.geometry;
  const uint32_t mask = warp::kFullMask;
  cache::set_look look = {cache::set_of(g, piece.line) * g.ways, 0};
  cache::place at;
  const bool absent = piece.bytes != 0 && cache::look_for_absent(g, piece.line, look, at);
  const uint32_t members = warp::ballot(mask, absent);
  if (members == 0) return 0;
  const uint64_t inside = way.base + ((piece.line - way.line_begin) << g.line_shift) + piece.offset;
  copy_segments<false> op = {piece};
  // Each lane has acquired what was written back of its own line; now all lanes read all of them.
  warp::sync(mask);
  op.copy<warp::source::kStream>(mask, members, inside);
  // The loads of the bytes come before the second look at the path.
  cache::finish_loads(mask);
  const bool current = absent && nvme::is_current(*way.queue, inside);
  return warp::ballot(mask, current);
}

// Gathers what `gather_around` left. A function of its own, so that the loop around it keeps its
// registers.
FW_DEVICE_NOINLINE void gather_left(const row_params& p, const segment& piece) {
  cache::tally tally;
  serve_segments<row_action::kGather>(p, piece, cache::fetch_misses(), tally);
  add_events(*p.volume, warp::kFullMask, tally, {});
}

// Gathers segments that nobody will ask for again soon: lines that are absent stay so.
FW_DEVICE void stream_segments(const row_params& p) {
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint32_t mask = warp::kFullMask;
  const uint32_t batch = batch_of(p);
  const warp::share mine = warp::share_of(segment_count(p), batch);
  if (mine.begin >= mine.end) return;
  uint64_t bypasses = 0;
  uint64_t bytes_around = 0;  // of this lane
  cache::refresh(c, v, mask);
  const cache::short_way way = cache::short_way_of(c, v);
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    const uint64_t item = first + warp::lane();
    segment piece = {0, 0, 0, 0};
    if (warp::lane() < batch && item < mine.end) piece = segment_at(p, way.line_begin, item);
    if (piece.line == kNoRow) refuse_row<row_action::kGather>(p, item);
    // Lanes may see different paths.
    const bool closed = warp::any(mask, !way.open);
    const uint32_t served = closed ? 0 : gather_around(p, way, piece);
    if ((served >> warp::lane()) & 1) {
      bytes_around += piece.bytes;
      piece.bytes = 0;
    }
    bypasses += base::popcount(served);
    if (warp::any(mask, piece.bytes != 0)) {
      base::opaque (&gather_left)(p, piece);
    }
  }
  cache::counters& shard = cache::shard_of(v);
  if (bytes_around != 0) {
    atomic::add_relaxed(&shard.bytes_read, bytes_around);
    atomic::add_relaxed(&shard.bytes_used, bytes_around);
  }
  if (warp::lane() == 0 && bypasses != 0) {
    atomic::add_relaxed(&shard.misses, bypasses);
    atomic::add_relaxed(&shard.bypasses, bypasses);
  }
}

// Moves all segments of a launch.
template <row_action kAction>
FW_DEVICE void move_segments(const row_params& p) {
  if (kAction == row_action::kScatter && !may_store(p)) return;
  if constexpr (kAction == row_action::kGather && warp::kWarpWidth == 1) {
    // Only the simulator defers with warps of one thread.
    if (p.misses.blocks == 0) return gather_by_thread<policy>(p);
  }
  warp::share mine = warp::share_of(segment_count(p), batch_of(p));
  if constexpr (kAction == row_action::kGather && warp::kWarpWidth > 1) {
    if (p.batch == 1) gather_residents(p, mine);
  }
  bool entered = false;
  if (mine.begin < mine.end) for_each_segment<kAction>(p, mine, entered);
  // By all warps of the block, those without segments too.
  if (p.misses.blocks != 0) base::opaque (&drain_segments<kAction>)(p, entered);
}

// Moves one element of a row for each lane that `wants`: the launch's `item`, in the row's `part`.
template <uint32_t kBytes, bool kStores, typename Misses>
FW_DEVICE void serve_elements(const row_params& p, uint64_t item, uint64_t row, uint64_t part,
                              bool wants, const Misses& misses, cache::tally& tally) {
  using word = atomic::raw<kBytes>;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint32_t mask = warp::kFullMask;
  const uint64_t byte = row * p.row_bytes + part * kBytes;
  const uint64_t line = v.line_begin + (byte >> p.geometry.line_shift);
  const uint64_t offset = byte & (cache::line_bytes(p.geometry) - 1);
  char* mine = p.rows + item * kBytes;
  uint32_t status;
  if constexpr (kStores) {
    detail::store_element<kBytes> op = {offset, {}};
    if (wants) op.value = word::load_stream(mine);
    status = cache::access<policy>(p.geometry, c, v, mask, wants, line, false, op, tally, misses);
  } else {
    detail::load_element<kBytes> op = {offset, {}};
    status = cache::access<policy>(p.geometry, c, v, mask, wants, line, false, op, tally, misses);
    if (wants && status == nvme::kSuccess) word::store(mine, op.value);
  }
  if (wants && status != cache::kDeferred) tally.bytes_used += kBytes;
}

template <uint32_t kBytes, bool kStores>
FW_DEVICE_NOINLINE void drain_elements(const row_params& p, bool entered) {
  cache::volume& v = *p.volume;
  cache::tally tally;
  const uint64_t parts = p.row_bytes / kBytes;
  const uint32_t multiprocessors = (p.misses.blocks + 3) / 4;
  cache::end_deferring(p.misses, v, multiprocessors, entered, [&](uint32_t item, bool active) {
    const uint64_t k = item / parts;
    const uint64_t row = active ? row_of(p, k) : p.row_count;
    const cache::fetch_misses misses;
    serve_elements<kBytes, kStores>(p, item, row, item - k * parts, row < p.row_count, misses,
                                    tally);
  });
  add_events(v, warp::kFullMask, tally, {});
}

// The same launch for a thread of the CPU device, which has no lanes to divide a row among.
FW_DEVICE row_params rows_of_elements(const row_params& p) {
  row_params rows = p;
  rows.segments = cache::line_bytes(p.geometry) % p.row_bytes == 0 ? 1 : 2;
  rows.batch = cache::piece_reader<policy>::kBatch;
  return rows;
}

// Moves rows of a few elements: each lane takes one element at a time.
template <uint32_t kBytes, bool kStores>
FW_DEVICE void for_each_element(const row_params& p) {
  if constexpr (!kStores && warp::kWarpWidth == 1) {
    if (p.misses.blocks == 0) return gather_by_thread<policy>(rows_of_elements(p));
  }
  using word = atomic::raw<kBytes>;
  if (kStores && !may_store(p)) return;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint32_t mask = warp::kFullMask;
  const uint64_t parts = p.row_bytes / kBytes;
  const warp::share share = warp::share_of(p.index_count * parts, warp::kWarpWidth);
  bool entered = false;
  cache::tally tally;
  cache::tally ahead;
  cache::refresh(c, v, mask);
  for (uint64_t first = share.begin; first < share.end; first += share.stride) {
    const uint64_t item = first + warp::lane();
    const uint64_t k = parts == 1 ? item : item / parts;
    const uint64_t row = item < share.end ? row_of(p, k) : p.row_count;
    const bool wants = row < p.row_count;
    if (!wants && item < share.end) {
      if constexpr (!kStores) word::store(p.rows + item * kBytes, {});
      if (item == k * parts) note_stray(p, k);
    }
    if (kLooksAhead && p.look_ahead != 0) {
      const uint64_t later = item + p.look_ahead * share.stride;
      const uint64_t there =
          later < share.end ? row_of(p, parts == 1 ? later : later / parts) : p.row_count;
      base::opaque (&cache::prefetch<policy>)(
          c, v, mask, there < p.row_count,
          v.line_begin + ((there * p.row_bytes) >> p.geometry.line_shift), ahead);
    }
    const cache::deferral misses = {p.misses, entered, item};
    serve_elements<kBytes, kStores>(p, item, row, item - k * parts, wants, misses, tally);
  }
  add_events(v, mask, tally, ahead);
  if (p.misses.blocks != 0) base::opaque (&drain_elements<kBytes, kStores>)(p, entered);
}

}  // namespace fw::kernels

#if FW_BUILDS(gather_rows)
FW_KERNEL_RESIDENT(2) fw_gather_rows(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  fw::kernels::move_segments<fw::kernels::row_action::kGather>(p);
}
#endif
#if FW_BUILDS(stream_rows)
FW_KERNEL_WIDE fw_stream_rows(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  fw::kernels::stream_segments(p);
}
#endif
#if FW_BUILDS(scatter_rows)
FW_KERNEL_RESIDENT(2) fw_scatter_rows(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  fw::kernels::move_segments<fw::kernels::row_action::kScatter>(p);
}
#endif
#if FW_BUILDS(prefetch_rows)
FW_KERNEL_RESIDENT(2) fw_prefetch_rows(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  fw::kernels::move_segments<fw::kernels::row_action::kPrefetch>(p);
}
#endif
#define FW_ELEMENT_KERNEL(NAME, BYTES, STORES)                                             \
  FW_KERNEL_RESIDENT(4) NAME##_##BYTES(const FW_GRID_CONSTANT fw::kernels::row_params p) { \
    fw::kernels::for_each_element<BYTES, STORES>(p);                                       \
  }
#if FW_BUILDS(gather_elements_1)
FW_ELEMENT_KERNEL(fw_gather_elements, 1, false)
#endif
#if FW_BUILDS(scatter_elements_1)
FW_ELEMENT_KERNEL(fw_scatter_elements, 1, true)
#endif
#if FW_BUILDS(gather_elements_2)
FW_ELEMENT_KERNEL(fw_gather_elements, 2, false)
#endif
#if FW_BUILDS(scatter_elements_2)
FW_ELEMENT_KERNEL(fw_scatter_elements, 2, true)
#endif
#if FW_BUILDS(gather_elements_4)
FW_ELEMENT_KERNEL(fw_gather_elements, 4, false)
#endif
#if FW_BUILDS(scatter_elements_4)
FW_ELEMENT_KERNEL(fw_scatter_elements, 4, true)
#endif
#if FW_BUILDS(gather_elements_8)
FW_ELEMENT_KERNEL(fw_gather_elements, 8, false)
#endif
#if FW_BUILDS(scatter_elements_8)
FW_ELEMENT_KERNEL(fw_scatter_elements, 8, true)
#endif
#if FW_BUILDS(gather_elements_16)
FW_ELEMENT_KERNEL(fw_gather_elements, 16, false)
#endif
#if FW_BUILDS(scatter_elements_16)
FW_ELEMENT_KERNEL(fw_scatter_elements, 16, true)
#endif
#undef FW_ELEMENT_KERNEL

#if FW_BUILDS(check_indices)
// Counts and notes the indices that are out of bounds, for a scatter behind it in the stream.
FW_KERNEL fw_check_indices(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  for (uint64_t k = fw::base::thread_index(); k < p.index_count; k += fw::base::thread_count()) {
    if (fw::kernels::row_of(p, k) < p.row_count) continue;
    fw::atomic::add_relaxed(p.strays, 1u);
    fw::kernels::note_stray(p, k);
  }
}
#endif
