// Gather, scatter and prefetch of rows of any width, and of contiguous ranges.
//
// A row is divided into segments, one for each line that it touches. A warp takes up to 32 segments
// at a time, one for each lane. It probes them together, fetches the missing lines with one bundle
// of commands, and copies each segment with all lanes. For rows of a few elements there are the
// kernels of elements.cuh. Every kernel takes one struct by value, which the host mirrors.
//
// If storage makes warps wait, a large launch defers its misses: see cache/miss_list.cuh. It holds
// all multiprocessors only as long as it serves hits.
#pragma once

#include "builds.cuh"
#include "client_rows.cuh"
#include "flashwarp/cache/short_miss.cuh"
#include "segments.cuh"

namespace fw::kernels {

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
FW_DEVICE uint32_t bundle_of(const row_params& p) {
  return p.bundle < warp::kWarpWidth ? p.bundle : warp::kWarpWidth;
}

// Takes one segment from the words of its line, by the shortcut of a miss.
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
  const lanes here = lanes::all();
  if (piece.bytes == 0 || (piece.offset | piece.buffer | piece.bytes) % 16 != 0) return false;
  cache::counters& shard = cache::shard_of(*v);
  const cache::shortcut cut = cache::shortcut_of(*c, *v);
  take_segment take = {piece};
  if (!cache::serve_short<policy, false>(g, *c, cut, shard, here, piece.line, take)) return false;
  if (warp::lane() == 0) atomic::add_relaxed(&shard.bytes_used, piece.bytes);
  return true;
}

// Gathers the warp's segments, one after the other, until one is neither resident nor fetched on
// the shortcut. Takes those that it has gathered out of `mine`. A call for a few rows does nothing
// else, so it is short: the instructions of a kernel that has just started are in no cache.
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
    } else if (lanes::all().any(epoch != 0) ||
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

// Gathers segments with one thread of the CPU device: in bundles what needs no wait, then the rest.
// While the storage makes it wait, the thread takes one segment at a time, and prefetches others. A
// thread of a client of a shared cache has many requests to the owner under way instead.
template <typename Policy>
FW_DEVICE void gather_by_thread(const row_params& p) {
  using reader = cache::piece_reader<Policy>;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const lanes here = lanes::all();
  const uint32_t bundle = p.bundle < reader::kBundle ? p.bundle : reader::kBundle;
  const uint64_t line = cache::line_bytes(p.geometry);
  const uint64_t piece_bytes = p.indices != nullptr && p.row_bytes < line ? p.row_bytes : line;
  const uint64_t segments = segment_count(p);
  warp::item_loop loop(segments, (kTakenBytes / piece_bytes / bundle + 1) * bundle);
  cache::tally tally;
  cache::tally ahead;
  reader pieces_of(p.geometry, v, cache::around_for(p.geometry, segments, bytes_asked_for(p)));
  const uint64_t line_begin = v.line_begin;
  cache::refresh(c, v, here);
  const bool of_client = c.owner != nullptr;
  asked_segments<false> asked_for(c, v);
  const uint64_t look_ahead = of_client ? 0 : p.look_ahead;
  // Segments in a row that needed neither a wait nor a prefetch.
  uint64_t quiet = 0;
  uint64_t first = 0;
  uint64_t end = 0;
  while (first < end || loop.next(first, end)) {
    segment pieces[reader::kBundle];
    const bool waits = quiet < look_ahead;
    const uint32_t most = waits ? 1 : bundle;
    const uint32_t count = end - first < most ? uint32_t(end - first) : most;
    for (uint32_t i = 0; i < count; i++) {
      pieces[i] = segment_at(p, line_begin, first + i);
      if (pieces[i].line == kNoRow) refuse_row<row_action::kGather>(p, first + i);
      tally.bytes_used += pieces[i].bytes;
    }
    const uint32_t asked = ahead.misses;
    if (waits && first + look_ahead < loop.part_end()) {
      const segment next = segment_at(p, line_begin, first + look_ahead);
      const bool asks = next.bytes != 0 && !pieces_of.is_in_memory(next);
      cache::prefetch<Policy>(c, v, here, asks, next.line, ahead);
    }
    const uint32_t misses = tally.misses;
    bool waited = ahead.misses != asked;
    for (uint32_t rest = pieces_of.read(pieces, count, tally); rest != 0; rest &= rest - 1) {
      const segment& piece = pieces[base::lowest_bit(rest)];
      if (of_client) {
        tally.misses++;
        asked_for.add(piece);
        continue;
      }
      waited = waited || !pieces_of.is_in_memory(piece);
      copy_segments<false> op = {piece};
      cache::access<Policy>({p.geometry, c, v, here}, {piece.line}, op, tally);
    }
    // If the page cache had a row that missed, it probably has the next ones too.
    const bool cached = tally.misses != misses;
    quiet = waited ? 0 : cached ? look_ahead : quiet + count;
    first += count;
  }
  asked_for.end();
  pieces_of.add_bypasses();
  add_events(v, here, tally, ahead);
}

// Moves or prefetches one segment for each lane; of 0 bytes: nothing.
template <row_action kAction, typename Misses>
FW_DEVICE void serve_segments(const row_params& p, const segment& piece, const Misses& misses,
                              cache::tally& tally) {
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const lanes here = lanes::all();
  const bool wants = piece.bytes != 0;
  if constexpr (kAction == row_action::kPrefetch) {
    if (misses.allowed()) {
      bool busy = false;
      const bool absent = wants && !cache::probe(p.geometry, piece.line, busy).found && !busy;
      const lanes missing = here.ballot(absent);
      if (!missing || misses.defer(missing)) return;
    }
    cache::prefetch<policy>(c, v, here, wants, piece.line, tally);
  } else {
    const bool whole = kAction == row_action::kScatter && wants &&
                       piece.bytes == cache::bytes_of_line(c, v, piece.line);
    copy_segments<kAction == row_action::kScatter> op = {piece};
    const uint32_t status = cache::access<policy>({p.geometry, c, v, here},
                                                  {piece.line, wants, whole}, op, tally, misses);
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
  add_events(v, lanes::all(), tally, {});
}

// Moves the warp's segments, a bundle at a time. `entered` says whether it has deferred some.
template <row_action kAction>
FW_DEVICE void for_each_segment(const row_params& p, const warp::share& mine, bool& entered) {
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const uint64_t line_begin = v.line_begin;
  const lanes here = lanes::all();
  const bool in_bundle = warp::lane() < bundle_of(p);
  cache::tally tally;
  cache::tally ahead;
  cache::refresh(c, v, here);
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    const uint64_t item = first + warp::lane();
    segment piece = {0, 0, 0, 0};
    if (in_bundle && item < mine.end) piece = segment_at(p, line_begin, item);
    if (piece.line == kNoRow) refuse_row<kAction>(p, item);
    if (kAction != row_action::kPrefetch && kLooksAhead && p.look_ahead != 0) {
      const uint64_t later = item + p.look_ahead * mine.stride;
      segment next = {0, 0, 0, 0};
      if (in_bundle && later < mine.end) next = segment_at(p, line_begin, later);
      base::opaque (&cache::prefetch<policy>)(c, v, here, next.bytes != 0, next.line, ahead);
    }
    const cache::deferral misses = {p.misses, entered, item};
    serve_segments<kAction>(p, piece, misses, tally);
  }
  add_events(v, here, tally, ahead);
}

// Moves all segments of a launch.
template <row_action kAction>
FW_DEVICE void move_segments(const row_params& p) {
  if (kAction == row_action::kScatter && !may_store(p)) return;
  if constexpr (kAction == row_action::kScatter && warp::kWarpWidth == 1) {
    if (p.cache->owner != nullptr) return scatter_to_owner(p);
  }
  if constexpr (kAction == row_action::kGather && warp::kWarpWidth == 1) {
    // Only the simulator defers with warps of one thread.
    if (p.misses.blocks == 0) return gather_by_thread<policy>(p);
  }
  warp::share mine = warp::share_of(segment_count(p), bundle_of(p));
  if constexpr (kAction == row_action::kGather && warp::kWarpWidth > 1) {
    if (p.bundle == 1) gather_residents(p, mine);
  }
  bool entered = false;
  if (mine.begin < mine.end) for_each_segment<kAction>(p, mine, entered);
  // By all warps of the block, those without segments too.
  if (p.misses.blocks != 0) base::opaque (&drain_segments<kAction>)(p, entered);
}

}  // namespace fw::kernels

#if FW_BUILDS(gather_rows)
FW_KERNEL_RESIDENT(2) fw_gather_rows(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  fw::kernels::move_segments<fw::kernels::row_action::kGather>(p);
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
