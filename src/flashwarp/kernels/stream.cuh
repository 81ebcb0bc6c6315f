// Gathers of rows that nobody will ask for again soon, around the cache.
#pragma once

#include "rows.cuh"

namespace fw::kernels {

// Copies the segments of absent lines from where the namespace is read in place to the caller's
// buffer, and fills no frame. Returns the lanes it has served; `access` must serve the others. What
// was stored before the look is in the namespace if the line is absent. What is stored later may or
// may not be seen, as by every gather beside it.
FW_DEVICE lanes gather_around(const row_params& p, const cache::shortcut& cut,
                              const segment& piece) {
  const cache::geometry& g = p.geometry;
  const lanes here = lanes::all();
  cache::set_look look = {cache::set_of(g, piece.line) * g.ways, 0};
  cache::place at;
  const bool absent = piece.bytes != 0 && cache::look_for_absent(g, piece.line, look, at);
  const lanes members = here.ballot(absent);
  if (!members) return {};
  const uint64_t inside = cut.base + ((piece.line - cut.line_begin) << g.line_shift) + piece.offset;
  copy_segments<false> op = {piece};
  // Each lane has acquired what was written back of its own line; now all lanes read all of them.
  here.sync();
  op.copy<warp::source::kStream>(here, members, inside);
  // The loads of the bytes come before the second look at the path.
  cache::finish_loads(here);
  const bool current = absent && nvme::is_current(*cut.queue, inside);
  return here.ballot(current);
}

// Gathers what `gather_around` left. A function of its own, so that the loop around it keeps its
// registers.
FW_DEVICE_NOINLINE void gather_left(const row_params& p, const segment& piece) {
  cache::tally tally;
  serve_segments<row_action::kGather>(p, piece, cache::fetch_misses(), tally);
  add_events(*p.volume, lanes::all(), tally, {});
}

// Gathers segments that nobody will ask for again soon: lines that are absent stay so.
FW_DEVICE void stream_segments(const row_params& p) {
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const lanes here = lanes::all();
  const uint32_t bundle = bundle_of(p);
  const warp::share mine = warp::share_of(segment_count(p), bundle);
  if (mine.begin >= mine.end) return;
  uint64_t bypasses = 0;
  uint64_t bytes_around = 0;  // of this lane
  cache::refresh(c, v, here);
  const cache::shortcut cut = cache::shortcut_of(c, v);
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    const uint64_t item = first + warp::lane();
    segment piece = {0, 0, 0, 0};
    if (warp::lane() < bundle && item < mine.end) piece = segment_at(p, cut.line_begin, item);
    if (piece.line == kNoRow) refuse_row<row_action::kGather>(p, item);
    // Lanes may see different paths.
    const bool closed = here.any(!cut.open);
    const lanes served = closed ? lanes() : gather_around(p, cut, piece);
    if (served.mine()) {
      bytes_around += piece.bytes;
      piece.bytes = 0;
    }
    bypasses += served.count();
    if (here.any(piece.bytes != 0)) {
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

}  // namespace fw::kernels

#if FW_BUILDS(stream_rows)
FW_KERNEL_WIDE fw_stream_rows(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  fw::kernels::stream_segments(p);
}
#endif
