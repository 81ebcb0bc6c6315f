// The short way of a miss: one line for all lanes, read in place, with one trip for each step.
//
// It is the common case of `serve_misses` (access.cuh) alone, in straight code that keeps all it
// needs in registers. What it reads of the cache, the volume and the queue pair is loaded together,
// ahead of the set's lock. The loads of the line are in flight while the claim's fence is, and what
// the caller wants is taken from them, not from the frame. It waits for no other warp. Whatever is
// not the common case is left to `serve_misses`: another namespace or path, a host tier, a set that
// is locked, a line that has come meanwhile, dirty victims only.
//
// `Take` gets the line's bytes as they pass:
//   void begin(source)     before the line is loaded; `source` is the line's address
//   void word(at, value)   16 bytes, from byte `at` of the line
//   kTakesWords            whether `word` does anything; few lanes then use no staging buffer
#pragma once

#include "flashwarp/cache/line_command.cuh"
#include "flashwarp/cache/tally.cuh"

namespace fw::cache {

// Where the short way finds the line.
struct short_source {
  const nvme::queue_pair* queue;
  uint64_t address;
  uint64_t bytes;
  uint32_t leased;
  bool open;  // no other lane's: lanes may see different paths
};
FW_DEVICE short_source short_source_of(const geometry& g, const volume& v, uint32_t seat,
                                       uint64_t line) {
  const uint64_t begin = (line - v.line_begin) << g.line_shift;
  const uint64_t rest = v.bytes - begin;
  const uint64_t bytes = rest < line_bytes(g) ? rest : line_bytes(g);
  const nvme::queue_pair& q = queue_of(v, seat);
  // Relaxed, and looked at again behind the loads: see `nvme::path_of`.
  const uint32_t path = atomic::load_relaxed_system(&q.data.path);
  const uint64_t address = q.data.mapped_base + begin;
  const bool open = (q.plain_reads != 0) & (path == nvme::kInPlace) &
                    ((address | bytes) % sizeof(atomic::word16) == 0);
  return {&q, address, bytes, q.data.leased, open};
}

// Claims a frame for the line, whose set this lane has locked, unless the set has dirty lines: the
// general way cleans them ahead.
template <typename Policy>
FW_DEVICE claim claim_short(line_cache& c, const geometry& g, uint64_t line, uint32_t hand) {
  claim out;
  set_view s = {g, set_of(g, line) * g.ways, line, 0, 0, 0, 0, hand, kNoWay, false, {}};
  const bool absent = look_at_set(s) == claim_result::kBlocked;
  const uint32_t full = (1u << g.ways) - 1;
  if (absent && s.dirty == 0 && (s.resident != full || s.candidates != 0)) {
    take_way<Policy>(s, way_to_fill<Policy>(c, s), out);
  }
  out.hand = s.hand & ~kSetLocked;
  return out;
}

// Copies the line from the namespace to the frame that the leader has claimed. `open` opens the
// set: behind the fence that `open_sets` describes, while the first loads are in flight.
template <typename Take, typename Open>
FW_DEVICE void copy_short(uint32_t mask, uint64_t frame, const short_source& from, Take& take,
                          Open open) {
  using word = atomic::raw<16>;
  const uint32_t bytes = uint32_t(from.bytes);
  take.begin(from.address);
  if constexpr (!Take::kTakesWords) {
    if (warp::is_staged(mask, frame, from.address, bytes)) {
      open();
      warp::copy<warp::source::kStream>(mask, frame, from.address, bytes);
      return;
    }
  }
  const uint32_t step = base::popcount(mask) * uint32_t(sizeof(atomic::word16));
  const uint32_t first = warp::rank_in(mask) * uint32_t(sizeof(atomic::word16));
  const char* source = reinterpret_cast<const char*>(from.address);
  char* target = reinterpret_cast<char*>(frame);
  for (uint32_t round = 0; round < bytes; round += step * warp::kCopyUnroll) {
    const uint32_t at = round + first;
    atomic::word16 values[warp::kCopyUnroll];
    FW_UNROLL
    for (uint32_t u = 0; u < warp::kCopyUnroll; u++) {
      if (at + u * step < bytes) values[u] = word::load_stream(source + at + u * step);
    }
    if (round == 0) open();
    FW_UNROLL
    for (uint32_t u = 0; u < warp::kCopyUnroll; u++) {
      if (at + u * step >= bytes) continue;
      word::store(target + at + u * step, values[u]);
      take.word(at + u * step, values[u]);
    }
  }
}

// Fills the absent line of all lanes of `mask`, which call together, and gives it to `take`.
// Returns false if it did not: then the general way takes the miss, and overwrites what `take` got.
// Counts in `count`, which the caller adds to `shard`, the volume's.
template <typename Policy, typename Take>
FW_DEVICE bool serve_short(const geometry& g, line_cache& c, volume& v, uint32_t mask,
                           uint64_t line, Take& take, tally& count) {
  const uint32_t leader = base::lowest_bit(mask);
  const bool leads = warp::lane() == leader;
  const uint32_t seat = take_seat(mask);
  uint32_t* const control = &c.set_control[set_of(g, line)];
  if (v.path != nvme::kInPlace || v.spread != kOneNamespace || c.tier_ways != 0) return false;
  // What these load arrives while the lock is on its way.
  const short_source from = short_source_of(g, v, seat, line);
  uint32_t seen = kSetLocked;
  if (leads) seen = atomic::or_acquire(control, kSetLocked);
  const bool locked = (seen & kSetLocked) == 0;
  const bool closed = warp::any(mask, !from.open);
  claim mine;
  mine.hand = seen;
  if (locked && !closed) mine = claim_short<Policy>(c, g, line, seen);
  const bool claimed = mine.result == claim_result::kClaimed;
  const bool all = warp::any(mask, claimed);
  const uint64_t way = warp::broadcast(mask, mine.way, leader);
  const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(g, way));
  // The leader has acquired the set, and what others have written back; now all lanes read that.
  warp::sync(mask);
  const auto open = [&] {
    // What `open_sets` says. All lanes pass before they store to the frame.
    atomic::fence();
    if (locked) atomic::store_relaxed(control, mine.hand);
  };
  bool current = true;
  if (all) {
    copy_short(mask, frame, from, take, open);
    if (from.leased != 0) {
      finish_loads(mask);
      current = !warp::any(mask, !nvme::is_current(*from.queue, from.address));
    } else {
      warp::sync(mask);
    }
    if (claimed && current) publish_fill(c, way, mine.word, false);
    if (claimed && !current) abandon_fill(c, way, mine.word);
  } else {
    open();
  }
  if (!all || !current) return false;
  count.misses += 1;
  count.evictions += warp::any(mask, mine.evicted) ? 1 : 0;
  count.bytes_read += line_bytes(g);
  return true;
}

}  // namespace fw::cache
