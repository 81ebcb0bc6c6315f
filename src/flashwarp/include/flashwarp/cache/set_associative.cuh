// The cache: sets of ways, each with one tag word and one frame, shared by several volumes.
//
// The set of a line is its number modulo the number of sets, so a data set no larger than the cache
// never conflicts with itself. Metadata grows with the cache, not with the data. Readers use no
// atomics: they compare the tag word before and after their loads. A set's lock covers changes of
// metadata only.
#pragma once

#include "flashwarp/base/copy.cuh"
#include "flashwarp/cache/policy.cuh"
#include "flashwarp/cache/volume.cuh"

namespace fw::cache {

// A line in its set: the index of its way in the cache, and the tag word that the probe saw.
struct place {
  uint64_t way;
  uint64_t word;
  bool found;
};

// Looks for a readable copy of `line`. Reads one or two 32-byte sectors; uses no atomics. `busy`
// says whether a warp is filling the line.
FW_DEVICE place probe(const geometry& g, uint64_t line, bool& busy) {
  busy = false;
  const home at = home_of(g, line);
  const uint64_t first = at.set * g.ways;
  for (uint32_t k = 0; k < g.ways; k += 2) {
    const uint64_t way = first + ((at.likely + k) & (g.ways - 1));
    // Acquire: pairs with the release that published the fill, after its data.
    const atomic::pair64 words = atomic::load_acquire_pair(&g.tags[way]);
    if (tag::holds(words.first, line)) return {way, words.first, true};
    if (tag::holds(words.second, line)) return {way + 1, words.second, true};
    busy = busy || tag::awaits(words.first, line) || tag::awaits(words.second, line);
  }
  return {0, 0, false};
}
FW_DEVICE place probe(const geometry& g, uint64_t line) {
  bool busy;
  return probe(g, line, busy);
}

// The tag words of four ways.
FW_DEVICE void load_words(const geometry& g, uint64_t way, uint64_t (&words)[4]) {
  const atomic::pair64 low = atomic::load_relaxed_pair(&g.tags[way]);
  const atomic::pair64 high = atomic::load_relaxed_pair(&g.tags[way + 2]);
  words[0] = low.first;
  words[1] = low.second;
  words[2] = high.first;
  words[3] = high.second;
}

// The second look: whether the loads since the probe saw the line's data. They must be acquire
// loads, or a fence_acquire() must come between them and this.
FW_DEVICE bool still_holds(const geometry& g, uint64_t way, uint64_t seen) {
  return tag::identity_of(atomic::load_relaxed(&g.tags[way])) == tag::identity_of(seen);
}

// The result of a miss that asked for a frame.
enum class claim_result : uint32_t {
  kHit,      // another warp has filled the line: probe again
  kBusy,     // another warp fills the line or holds the set's lock: try again later
  kClaimed,  // the frame is ours, tag BUSY: fill it, then publish or abandon the fill
  kDirty,    // all candidates are dirty: write back the line in `way` (tag WRITING)
  kBlocked,  // every frame is pinned or in flight: try again later
};

// What a claimed frame is for.
enum class purpose : uint32_t {
  kUse,       // the caller's access
  kPrefetch,  // a later access
  // A line that leaves its frame at once. Such lines take turns in one frame of a set: as long as
  // a line is on its way into or out of the set, they evict no other.
  kPass,
};

struct claim {
  claim_result result = claim_result::kBusy;
  uint64_t way = 0;
  uint64_t word = 0;       // kClaimed: the BUSY word. kDirty: the victim's word before
  bool evicted = false;    // the frame held a line, `victim`
  bool has_dirty = false;  // kClaimed: the next victim is dirty; this warp writes it back ahead
  uint64_t dirty_way = 0;
  uint64_t dirty_word = 0;
  uint64_t victim = 0;
  // kClaimed: the place in the host tier that the line leaves, and the one that the victim takes.
  uint32_t tier_from = kNoTierWay;
  uint32_t tier_to = kNoTierWay;
  // What opens the set again, which stays locked until `open_sets`; null if this lane has no lock.
  uint32_t* control = nullptr;
  uint32_t hand = 0;
};

// Looks at all ways of the set, whose lock we hold. Returns kHit or kBusy if one of them has
// `s.line`, else kBlocked.
FW_DEVICE claim_result look_at_set(set_view& s) {
  const geometry& g = s.geometry;
  claim_result result = claim_result::kBlocked;
  s.resident = s.candidates = s.referenced = s.dirty = s.moving = 0;
  s.next = kNoWay;
  // Four words at a time, all loaded before the first is used: one trip to memory.
  const auto look = [&](uint32_t first, const uint64_t (&words)[4]) {
    FW_UNROLL
    for (uint32_t k = 0; k < 4; k++) {
      const uint64_t word = words[k];
      const bool valid = tag::state_of(word) == tag::kValid;
      const uint32_t bit = tag::state_of(word) == tag::kInvalid ? 0 : 1u << (first + k);
      s.resident |= bit;
      if (tag::is_replaceable(word)) s.candidates |= bit;
      if (tag::is_cleanable(word)) s.dirty |= bit;
      if (tag::state_of(word) == tag::kBusy || (word & tag::kWriting) != 0) s.moving |= bit;
      if ((word & tag::kReferenced) != 0) s.referenced |= bit;
      if (bit != 0 && tag::line_of(word) == s.line) {
        result = valid ? claim_result::kHit : claim_result::kBusy;
      }
    }
  };
  // The usual number of ways without a branch, behind which the loads would wait for each other.
  load_words(g, s.first, s.words);
  look(0, s.words);
  for (uint32_t first = 4; first < g.ways; first += 4) {
    uint64_t words[4];
    load_words(g, s.first + first, words);
    look(first, words);
  }
  return result;
}

// Asks the policy for one of the candidates. Any other answer is refused and counted, and the
// lowest candidate takes its place.
template <typename Policy>
FW_DEVICE uint32_t choose_way(line_cache& c, set_view& s) {
  const uint32_t allowed = s.candidates;
  const uint32_t way = Policy::choose_victim(s);
  if (way < s.geometry.ways && set_view::has(allowed, way)) return way;
  atomic::add_relaxed(&c.refusals, 1u);
  s.next = kNoWay;
  return base::lowest_bit(allowed);
}

// Starts cleaning the line that the policy expects to choose next.
FW_DEVICE void clean_ahead(const set_view& s, claim& out) {
  if (s.next >= s.geometry.ways || !set_view::has(s.dirty, s.next)) return;
  const uint64_t way = s.first + s.next;
  const uint64_t word = atomic::load_relaxed(&s.geometry.tags[way]);
  if (!tag::is_cleanable(word) || !begin_write(&s.geometry.tags[way], tag::line_of(word))) return;
  out.has_dirty = true;
  out.dirty_way = way;
  out.dirty_word = word;
}

// The way that a fill takes: an empty one or, if there is none, the policy's victim.
template <typename Policy>
FW_DEVICE uint32_t way_to_fill(line_cache& c, set_view& s) {
  const uint32_t empty = ((1u << s.geometry.ways) - 1) & ~s.resident;
  const uint32_t likely = empty & (3u << home_of(s.geometry, s.line).likely);
  return likely != 0  ? base::lowest_bit(likely)
         : empty != 0 ? base::lowest_bit(empty)
                      : choose_way<Policy>(c, s);
}

// Takes the way, in the set whose lock we hold. Returns false if another thread has pinned its line
// or stored to it.
template <typename Policy>
FW_DEVICE bool take_way(set_view& s, uint32_t way, claim& out) {
  uint64_t* word = &s.geometry.tags[s.first + way];
  // Relaxed: `open_sets` has a fence, before any lane uses the frame.
  uint64_t now = 0;
  uint64_t old = s.seen(way);
  for (; tag::is_replaceable(old); old = atomic::load_relaxed(word)) {
    now = tag::busy(old, s.line) | mark_at_birth<Policy>();
    if (atomic::cas_relaxed(word, old, now)) break;
  }
  if (!tag::is_replaceable(old)) return false;
  s.resident |= 1u << way;
  Policy::on_fill(s, way);
  out.result = claim_result::kClaimed;
  out.way = s.first + way;
  out.word = now;
  out.evicted = tag::state_of(old) == tag::kValid;
  out.victim = tag::line_of(old);
  return true;
}

// Takes an empty way, or the victim that the policy chose, in the set whose lock we hold.
template <typename Policy>
FW_DEVICE void claim_victim(line_cache& c, set_view& s, claim& out) {
  // Another thread may pin the victim or store to it first: then look and choose again. One try for
  // each way is enough, because the caller repeats the claim.
  for (uint32_t attempt = 0; attempt < s.geometry.ways; attempt++) {
    if (attempt != 0) look_at_set(s);
    const uint32_t empty = ((1u << s.geometry.ways) - 1) & ~s.resident;
    if ((empty | s.candidates) != 0) {
      if (!take_way<Policy>(s, way_to_fill<Policy>(c, s), out)) continue;
      clean_ahead(s, out);
      return;
    }
    if (s.dirty == 0) break;
    s.candidates = s.dirty;
    const uint64_t way = s.first + choose_way<Policy>(c, s);
    const uint64_t word = atomic::load_relaxed(&s.geometry.tags[way]);
    if (tag::is_cleanable(word) && begin_write(&s.geometry.tags[way], tag::line_of(word))) {
      out.result = claim_result::kDirty;
      out.way = way;
      out.word = word;
      return;
    }
  }
  out.result = claim_result::kBlocked;
}

// The first place of the subset of the host tier that `line`, of set `set`, belongs to.
FW_DEVICE uint64_t tier_first(const line_cache& c, uint64_t set, uint64_t line) {
  const geometry& g = c.geometry;
  const uint64_t round = g.set_count == 1 ? line : base::multiply_high(line, g.set_reciprocal);
  return tier::first_of(c.tier, c.tier_ways, set, round);
}

// As claim_victim, for a cache with a host tier: also takes the line's place in the tier, and a
// place for the victim. The whole warp moves the data later (claim_lines).
template <typename Policy>
FW_DEVICE void claim_both(line_cache& c, uint64_t set, set_view& s, claim& out) {
  uint32_t place = kNoTierWay;
  const uint64_t line = s.line;
  const uint64_t found = tier::find(c.tier, c.tier_ways, tier_first(c, set, line), line, place);
  // A warp is copying the line into the tier. It waits for nothing, so the caller can try again.
  if (found == tier::kEntering) return;
  claim_victim<Policy>(c, s, out);
  if (out.result != claim_result::kClaimed) return;
  const bool enters = out.evicted && out.victim < kTierLines;
  const uint64_t there = tier_first(c, set, out.victim);
  if (found == tier::kHeld) {
    out.tier_from = place;
    // In one subset line and victim swap, so that a full tier loses neither.
    if (enters && place - there < c.tier_ways) {
      out.tier_to = place;
      tier::enter_at(c.tier, c.tier_ways, there, out.victim, place);
      return;
    }
    tier::change(c.tier, place, tier::kLeaving);
  }
  // The victim is of this set, whose lock we hold: no warp can fill it before it is in the tier.
  if (enters) out.tier_to = tier::enter(c.tier, c.tier_ways, there, out.victim);
}

// What claim_frame does while it holds the lock. `hand` is the set's.
template <typename Policy, bool kTier>
FW_DEVICE claim claim_in(line_cache& c, const geometry& g, uint64_t set, uint64_t line,
                         uint32_t hand, purpose why) {
  claim out;
  const bool prefetched = why == purpose::kPrefetch;
  set_view s = {g, set * g.ways, line, 0, 0, 0, 0, hand, kNoWay, prefetched, {}};
  const claim_result present = look_at_set(s);
  const uint32_t all = (1u << g.ways) - 1;
  if (present != claim_result::kBlocked) {
    out.result = present;
  } else if (why == purpose::kPass && s.resident == all && s.moving != 0) {
    out.result = claim_result::kBlocked;
  } else if constexpr (kTier) {
    claim_both<Policy>(c, set, s, out);
  } else {
    claim_victim<Policy>(c, s, out);
  }
  out.control = &c.set_control[set];
  out.hand = s.hand & ~kSetLocked;
  return out;
}
template <typename Policy>
FW_DEVICE_NOINLINE claim claim_with_tier(line_cache& c, uint64_t set, uint64_t line, uint32_t hand,
                                         purpose why) {
  return claim_in<Policy, true>(c, c.geometry, set, line, hand, why);
}

// Asks for a frame for `line`. One lane; never waits. claim_lines calls it, and then opens the set
// and moves lines to and from the host tier. Inlined, with a copy of the geometry, because what
// lies in memory costs a trip behind each fence.
template <typename Policy>
FW_DEVICE claim claim_frame(line_cache& c, const geometry& g, uint64_t line, purpose why) {
  const uint64_t set = set_of(g, line);
  // One trip: a set that is locked already stays as it is.
  const uint32_t seen = atomic::or_acquire(&c.set_control[set], kSetLocked);
  if ((seen & kSetLocked) != 0) return claim();
  if (c.tier_ways != 0) return claim_with_tier<Policy>(c, set, line, seen, why);
  return claim_in<Policy, false>(c, g, set, line, seen, why);
}

// Ends the claims of a warp: opens the sets that its lanes have locked. All lanes of `here` call
// together. One fence of every lane does three things. The changes of metadata come before the sets
// can be locked again. What others did with the frames before comes before our lanes use them. And
// the tags have gone BUSY before any lane stores to the frames: a reader that sees a new byte finds
// its tag changed.
FW_DEVICE void open_sets(lanes here, const claim& mine) {
  const bool locked = mine.control != nullptr;
  if (!here.any(locked)) return;
  // Acquire, for all lanes, what the look saw: who empties a frame without the lock has written its
  // line back.
  if (locked) atomic::fence_acquire();
  // Each lane has claimed its own frame; now all lanes may store to all of them.
  here.sync();
  atomic::fence();
  if (locked) atomic::store_relaxed(mine.control, mine.hand);
}

// End a fill. Release: the data, stored by lanes that this lane has synchronised with, comes first.
FW_DEVICE void publish_fill(line_cache& c, uint64_t way, uint64_t busy_word, bool dirty) {
  atomic::store_release(&c.geometry.tags[way], tag::filled(busy_word, dirty));
}
FW_DEVICE void abandon_fill(line_cache& c, uint64_t way, uint64_t busy_word) {
  atomic::store_release(&c.geometry.tags[way], tag::emptied(busy_word));
}

// Ends a fill of a clean line, behind a fence() of the caller.
FW_DEVICE void end_fill(uint64_t* word, uint64_t busy_word, bool filled) {
  atomic::store_relaxed(word, filled ? tag::filled(busy_word, false) : tag::emptied(busy_word));
}

}  // namespace fw::cache
