// The short way of a miss: one line for all lanes, read in place, with one trip for each step.
//
// It is the common case of `serve_misses` (access.cuh) alone, in straight code that keeps all it
// needs in registers. What it reads of the cache, the volume and the queue pair is loaded together,
// ahead of the set's lock. The loads of the line are in flight while the leader claims a frame, and
// what the caller wants is taken from them, not from the frame. It waits for no other warp.
// Whatever is not the common case is left to `serve_misses`: another namespace or path, a host
// tier, a set that is locked, a line that has come meanwhile, dirty victims only.
//
// `Take` gets the line's bytes as they pass:
//   void begin(source)     before the line is loaded; `source` is the line's address
//   void word(at, value)   16 bytes, from byte `at` of the line
//   kTakesWords            whether `word` does anything; the line then passes registers
//   void piece(at, from)   if it does not: a piece of the line (staging.cuh), at `from` in shared
//                          memory. A `Take` gets `piece` where there is a staging buffer, else
//                          `begin` and `word`.
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
  bool changes;  // warps store to the namespace
  bool open;     // no other lane's: lanes may see different paths
};

// What the short way needs of a volume.
struct short_volume {
  uint64_t line_begin;
  uint64_t bytes;
  const nvme::queue_pair* queues;
  uint32_t queue_count;
  uint32_t spread;
  uint32_t path;
};

FW_DEVICE short_source short_source_of(const geometry& g, const short_volume& v, uint32_t seat,
                                       uint64_t line) {
  const uint64_t begin = (line - v.line_begin) << g.line_shift;
  const uint64_t rest = v.bytes - begin;
  const uint64_t bytes = rest < line_bytes(g) ? rest : line_bytes(g);
  const nvme::queue_pair& q = v.queues[seat % v.queue_count];
  // Relaxed, and looked at again behind the loads: see `nvme::path_of`.
  const uint32_t path = atomic::load_relaxed_system(&q.data.path);
  const uint64_t address = q.data.mapped_base + begin;
  const bool open = (q.plain_reads != 0) & (path == nvme::kInPlace) &
                    ((address | bytes) % sizeof(atomic::word16) == 0);
  return {&q, address, bytes, q.data.leased, q.plain_writes != 0, open};
}

// Whether a frame can be claimed for the absent line in the set, which this lane has locked. Not if
// the set has dirty lines: the general way cleans them ahead.
FW_DEVICE bool has_room(set_view& s) {
  const bool absent = look_at_set(s) == claim_result::kBlocked;
  const uint32_t full = (1u << s.geometry.ways) - 1;
  return absent && s.dirty == 0 && (s.resident != full || s.candidates != 0);
}

// The copy of a line from the namespace to a frame, in two halves: `begin` sends the first loads,
// while the leader claims the frame, and `end` stores what they give, and copies the rest. Between
// them comes the fence that `open_sets` describes. This one loads to registers.
template <typename Take>
struct register_copy {
  static constexpr uint32_t kWord = sizeof(atomic::word16);
  using word = atomic::raw<kWord>;

  const uint32_t mask;
  const uint64_t source;
  const uint32_t bytes;
  Take& take;
  atomic::word16 values[warp::kCopyUnroll];

  FW_DEVICE register_copy(uint32_t lanes, const short_source& from, Take& taker)
      : mask(lanes), source(from.address), bytes(uint32_t(from.bytes)), take(taker) {}

  FW_DEVICE bool reserve() { return true; }
  FW_DEVICE void begin() {
    take.begin(source);
    load(0);
  }
  FW_DEVICE void end(uint64_t frame) {
    store(0, frame);
    for (uint32_t round = round_bytes(); round < bytes; round += round_bytes()) {
      load(round);
      store(round, frame);
    }
  }
  FW_DEVICE void cancel() {}
  FW_DEVICE void release() {}

 private:
  FW_DEVICE uint32_t step() const { return base::popcount(mask) * kWord; }
  FW_DEVICE uint32_t round_bytes() const { return step() * warp::kCopyUnroll; }
  // Whole rounds have no condition inside, which would make each load wait for the one before.
  FW_DEVICE bool is_whole(uint32_t round) const { return round + round_bytes() <= bytes; }

  FW_DEVICE void load(uint32_t round) {
    const uint32_t at = round + warp::rank_in(mask) * kWord;
    const char* from = reinterpret_cast<const char*>(source) + at;
    if (is_whole(round)) {
      FW_UNROLL
      for (uint32_t u = 0; u < warp::kCopyUnroll; u++) {
        values[u] = word::load_stream(from + u * step());
      }
    } else {
      FW_UNROLL
      for (uint32_t u = 0; u < warp::kCopyUnroll; u++) {
        if (at + u * step() < bytes) values[u] = word::load_stream(from + u * step());
      }
    }
  }
  FW_DEVICE void store(uint32_t round, uint64_t frame) {
    const uint32_t at = round + warp::rank_in(mask) * kWord;
    char* to = reinterpret_cast<char*>(frame) + at;
    const bool whole = is_whole(round);
    FW_UNROLL
    for (uint32_t u = 0; u < warp::kCopyUnroll; u++) {
      if (!whole && at + u * step() >= bytes) continue;
      word::store(to + u * step(), values[u]);
      take.word(at + u * step(), values[u]);
    }
  }
};

// As register_copy, by the copy engine: the loads need no registers, which would be spilled, and
// no fence waits for them.
template <typename Take>
struct staged_copy {
  const uint32_t mask;
  const uint64_t source;
  const uint32_t bytes;
  const bool changes;
  Take& take;

  FW_DEVICE staged_copy(uint32_t lanes, const short_source& from, Take& taker)
      : mask(lanes),
        source(from.address),
        bytes(uint32_t(from.bytes)),
        changes(from.changes),
        take(taker) {}

  // One try: warps of a block that miss together take the general way, as many as want to.
  FW_DEVICE bool reserve() { return warp::take_buffer(mask, 1); }
  FW_DEVICE void begin() { warp::begin_staged(mask, source, bytes, changes); }
  FW_DEVICE void end(uint64_t frame) { warp::end_staged(mask, frame, source, bytes, take); }
  FW_DEVICE void cancel() { warp::cancel_staged(mask, bytes); }
  // By the leader, behind a fence.
  FW_DEVICE void release() { warp::give_buffer(); }
};

template <typename Take, bool kStaged>
struct copy_of {
  using type = staged_copy<Take>;
};
template <typename Take>
struct copy_of<Take, false> {
  using type = register_copy<Take>;
};
template <typename Take>
using short_copy = typename copy_of<Take, warp::kHasStaging && !Take::kTakesWords>::type;

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
  const short_volume facts = {v.line_begin, v.bytes, v.queues, v.queue_count, v.spread, v.path};
  const uint32_t tier_ways = c.tier_ways;
  // Keeps the loads together: they would sink behind the branches, and take one trip each.
  warp::sync(mask);
  if ((facts.path != nvme::kInPlace) | (facts.spread != kOneNamespace) | (tier_ways != 0)) {
    return false;
  }
  const short_source from = short_source_of(g, facts, seat, line);
  // Before the set is locked: a line that takes a command pays no more than these loads.
  if (warp::any(mask, !from.open)) return false;
  short_copy<Take> copy(mask, from, take);
  if (!copy.reserve()) return false;
  uint32_t seen = kSetLocked;
  if (leads) seen = atomic::or_acquire(control, kSetLocked);
  const bool locked = (seen & kSetLocked) == 0;
  set_view s = {g, set_of(g, line) * g.ways, line, 0, 0, 0, 0, seen, kNoWay, false, {}};
  const bool room = locked && has_room(s);
  const bool fills = warp::any(mask, room);
  // The leader has acquired the set, and what others have written back; now all lanes read that.
  warp::sync(mask);
  // While the set is locked, nobody else can fill the line, and so change what the storage has.
  if (fills) copy.begin();
  claim mine;
  if (room) take_way<Policy>(s, way_to_fill<Policy>(c, s), mine);
  const bool claimed = mine.result == claim_result::kClaimed;
  const bool all = warp::any(mask, claimed);
  const uint64_t frame =
      reinterpret_cast<uint64_t>(frame_of(g, warp::broadcast(mask, mine.way, leader)));
  bool current = true;
  // What `open_sets` says. All lanes pass before they store to the frame.
  warp::sync(mask);
  atomic::fence();
  if (locked) atomic::store_relaxed(control, s.hand & ~kSetLocked);
  if (all) {
    copy.end(frame);
    if (from.leased != 0) {
      finish_loads(mask);
      current = !warp::any(mask, !nvme::is_current(*from.queue, from.address));
    } else {
      warp::sync(mask);
    }
  } else if (fills) {
    copy.cancel();
  }
  if (leads) {
    // One fence: the line is there before its tag says so, and the staging buffer is read before
    // another warp gets it.
    atomic::fence();
    if (claimed) end_fill(c, mine.way, mine.word, current);
    copy.release();
  }
  if (!all || !current) return false;
  count.misses += 1;
  count.evictions += warp::any(mask, mine.evicted) ? 1 : 0;
  count.bytes_read += line_bytes(g);
  return true;
}

}  // namespace fw::cache
