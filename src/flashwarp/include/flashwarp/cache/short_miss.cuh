// The shortcut of a miss: one line for all lanes, read in place, with one trip for each step.
//
// It is the common case of `serve_misses` (access.cuh) alone, in straight code that keeps all it
// needs in registers. The leader asks for the set's lock and for the staging buffer at once, and
// looks at the set. Then the line is on its way while the leader claims a frame, and what the
// caller wants is taken from the line as it comes, not from the frame. It waits for no other warp.
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

// The shortcut to the lines of a volume: what it needs of the cache, the volume and a queue pair.
struct shortcut {
  const nvme::queue_pair* queue;
  uint32_t* set_control;
  uint64_t line_begin;
  uint64_t bytes;  // of the namespace
  uint64_t base;   // its address
  uint32_t leased;
  bool changes;  // warps store to the namespace
  bool open;     // no other lane's: lanes may see different paths
};

// Two trips to memory.
FW_DEVICE shortcut shortcut_of(const line_cache& c, const volume& v) {
  uint32_t* const set_control = c.set_control;
  const uint32_t tier_ways = c.tier_ways;
  const uint64_t line_begin = v.line_begin;
  const uint64_t bytes = v.bytes;
  const bool usual = (v.spread == kOneNamespace) & (v.path == nvme::kInPlace) & (tier_ways == 0);
  // Any queue pair knows the place, and the host changes the path of all.
  const nvme::queue_pair& q = v.queues[0];
  // Relaxed, and looked at again behind the loads: see `nvme::path_of`.
  const uint32_t path = atomic::load_relaxed_system(&q.data.path);
  const bool open = usual & (q.plain_reads != 0) & (path == nvme::kInPlace);
  const bool changes = q.plain_writes != 0;
  return {&q, set_control, line_begin, bytes, q.data.mapped_base, q.data.leased, changes, open};
}

// Where it finds a line.
struct short_source {
  uint64_t address;
  uint64_t bytes;
  bool aligned;
};
FW_DEVICE short_source short_source_of(const geometry& g, const shortcut& cut, uint64_t line) {
  const uint64_t begin = (line - cut.line_begin) << g.line_shift;
  const uint64_t rest = cut.bytes - begin;
  const uint64_t bytes = rest < line_bytes(g) ? rest : line_bytes(g);
  const uint64_t address = cut.base + begin;
  return {address, bytes, (address | bytes) % sizeof(atomic::word16) == 0};
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
// them comes the fence that `open_sets` describes. The leader says whether to begin. If `begin`
// returns false, it did not say so; if true, other lanes may not know yet. Instead of `end`,
// `cancel` may follow. All lanes have stored, or let go, when either returns. This one loads to
// registers.
template <typename Take>
struct register_copy {
  static constexpr uint32_t kWord = sizeof(atomic::word16);
  using word = atomic::raw<kWord>;

  const lanes here;
  const uint64_t source;
  const uint32_t bytes;
  Take& take;
  atomic::word16 values[warp::kCopyUnroll];

  FW_DEVICE register_copy(lanes all, const short_source& from, bool, Take& taker)
      : here(all), source(from.address), bytes(uint32_t(from.bytes)), take(taker) {}

  FW_DEVICE bool reserve() { return true; }
  FW_DEVICE bool begin(bool first) {
    if (!here.any(first)) return false;
    // The leader has acquired what others have written back; now all lanes read that.
    here.sync();
    take.begin(source);
    load(0);
    return true;
  }
  FW_DEVICE void end(uint64_t frame) {
    store(0, frame);
    for (uint32_t round = round_bytes(); round < bytes; round += round_bytes()) {
      load(round);
      store(round, frame);
    }
    here.sync();
  }
  FW_DEVICE void cancel() {}
  FW_DEVICE void release() {}

 private:
  FW_DEVICE uint32_t step() const { return here.count() * kWord; }
  FW_DEVICE uint32_t round_bytes() const { return step() * warp::kCopyUnroll; }
  // Whole rounds have no condition inside, which would make each load wait for the one before.
  FW_DEVICE bool is_whole(uint32_t round) const { return round + round_bytes() <= bytes; }

  FW_DEVICE void load(uint32_t round) {
    const uint32_t at = round + here.rank() * kWord;
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
    const uint32_t at = round + here.rank() * kWord;
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
  const lanes here;
  const uint64_t source;
  const uint32_t bytes;
  const bool changes;
  Take& take;

  FW_DEVICE staged_copy(lanes all, const short_source& from, bool stores, Take& taker)
      : here(all),
        source(from.address),
        bytes(uint32_t(from.bytes)),
        changes(stores),
        take(taker) {}

  // One try: warps of a block that miss together take the general way, as many as want to.
  FW_DEVICE bool reserve() { return warp::try_buffer(); }
  FW_DEVICE bool begin(bool first) {
    if (first) warp::begin_staged(source, bytes, changes);
    return true;
  }
  FW_DEVICE void end(uint64_t frame) { warp::end_staged(here, frame, source, bytes, take); }
  FW_DEVICE void cancel() { warp::cancel_staged(here, bytes); }
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

// What the leader tells the other lanes: the address of the frame, or one of these.
inline constexpr uint64_t kNotBegun = 0;
inline constexpr uint64_t kNotClaimed = 1;  // the copy has begun for nothing

// Opens the set, and gives the copy's buffer back, as far as the leader has them, without a change.
template <typename Copy>
FW_DEVICE void undo_short(uint32_t* control, uint32_t hand, bool locked, bool reserved,
                          Copy& copy) {
  // Who is next sees what was done before us, too.
  atomic::fence();
  if (locked) atomic::store_relaxed(control, hand);
  if (reserved) copy.release();
}

// Locks the set and reserves the copy, by the leader. What it asks of memory is on its way
// together.
template <typename Copy>
FW_DEVICE bool begin_short(uint32_t* control, Copy& copy, uint32_t& hand) {
  hand = atomic::or_relaxed(control, kSetLocked);
  const bool reserved = copy.reserve();
  // Acquire the set and the buffer.
  atomic::fence_acquire();
  const bool locked = (hand & kSetLocked) == 0;
  if (reserved & locked) return true;
  undo_short(control, hand, locked, reserved, copy);
  return false;
}

// Fills the absent line of all lanes of `here`, which call together, and gives it to `take`.
// Returns false if it did not: then the general way takes the miss, and overwrites what `take` got.
// Adds its events to `shard`, the volume's, with those of users' kernels if `kKernel`.
//
// While the set is locked and the line absent, nobody else can fill it, and so change what the
// storage has. The copy does not begin ahead of the look: of warps that miss on one line together,
// all would read it.
template <typename Policy, bool kKernel, typename Take>
FW_DEVICE bool serve_short(const geometry& g, line_cache& c, const shortcut& cut, counters& shard,
                           lanes here, uint64_t line, Take& take) {
  const bool leads = here.leads();
  const home at = home_of(g, line);
  uint32_t* const control = &cut.set_control[at.set];
  const short_source from = short_source_of(g, cut, line);
  short_copy<Take> copy(here, from, cut.changes, take);
  set_view s = {g, at.set * g.ways, line, 0, 0, 0, 0, 0, kNoWay, false, {}};
  // A line that takes a command pays no more than the loads for `cut`.
  const bool holds = leads && cut.open && from.aligned && begin_short(control, copy, s.hand);
  const bool room = holds && has_room(s);
  if (holds && !room) undo_short(control, s.hand, true, true, copy);
  // Acquire what the look saw: who empties a frame has written its line back.
  atomic::fence_acquire();
  if (!copy.begin(room)) return false;
  claim mine;
  if (room) take_way<Policy>(s, way_to_fill<Policy>(c, s), mine);
  uint64_t frame = room ? kNotClaimed : kNotBegun;
  if (mine.result == claim_result::kClaimed) {
    frame = reinterpret_cast<uint64_t>(frame_of(g, mine.way));
  }
  uint64_t* const word = &g.tags[mine.way];
  frame = here.broadcast(frame);
  if (frame == kNotBegun) return false;
  bool current = true;
  // What `open_sets` says. All lanes pass before they store to the frame.
  here.sync();
  atomic::fence();
  if (leads) atomic::store_relaxed(control, s.hand & ~kSetLocked);
  if (frame != kNotClaimed) {
    tally count;
    count.misses = 1;
    count.evictions = mine.evicted ? 1 : 0;
    count.bytes_read = line_bytes(g);
    // Here, and not behind the copy, while the line is still on its way.
    kKernel ? count.add_kernel_to(shard, here) : count.add_to(shard, here);
    copy.end(frame);
    if (cut.leased != 0) {
      finish_loads(here);
      current = !here.any(!nvme::is_current(*cut.queue, from.address));
    }
  } else {
    copy.cancel();
  }
  if (leads) {
    // One fence: the line is there before its tag says so, and the staging buffer is read before
    // another warp gets it.
    atomic::fence();
    if (frame != kNotClaimed) end_fill(word, mine.word, current);
    copy.release();
  }
  return frame != kNotClaimed && current;
}

}  // namespace fw::cache
