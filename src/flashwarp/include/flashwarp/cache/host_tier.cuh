// The host-memory tier: a victim cache in pinned host memory, below the frames in device memory.
//
// A clean victim enters the tier. A miss looks there first and takes the line out again, so a line
// is in a frame or in the tier, never in both. Dirty lines never enter. Each set of the cache has
// its own subsets of the tier, a few ways each, and the set's lock covers them. So a line enters
// the tier in the same step in which it leaves its frame, and no fill of it can come in between.
// The tier's tags are in device memory. A cache without a tier has no ways here.
#pragma once

#include "flashwarp/cache/line_state.cuh"

namespace fw::cache {

struct host_tier {
  uint64_t* tags;    // sets of the cache * subsets * ways
  char* frames;      // pinned host memory: one for each tag
  uint32_t subsets;  // of each set; a line belongs to one of them
  uint32_t reserved;
};
static_assert(sizeof(host_tier) == 24);

// Lines with numbers from here on do not enter: their storage is memory already.
inline constexpr uint64_t kTierLines = uint64_t(1) << (tag::kLineBits - 1);

inline constexpr uint32_t kNoTierWay = ~uint32_t(0);

// The word of a place in the tier. Only a holder of the set's lock takes a place.
//
//   63:62 state   61:38 stamp: order of arrival   37:0 line
//
// EMPTY -> ENTERING (its data is being copied in) -> HELD -> LEAVING (being copied out) -> EMPTY,
// or HELD -> ENTERING with another line, which replaces the oldest line or swaps with a line that
// leaves. The warp that copies ends ENTERING and LEAVING without the lock.
namespace tier {

inline constexpr uint64_t kEmpty = 0;
inline constexpr uint64_t kEntering = uint64_t(1) << 62;
inline constexpr uint64_t kHeld = uint64_t(2) << 62;
inline constexpr uint64_t kLeaving = uint64_t(3) << 62;
inline constexpr uint64_t kStateMask = uint64_t(3) << 62;
inline constexpr uint64_t kStampMask = (uint64_t(1) << 24) - 1;

FW_HOST_DEVICE uint64_t state_of(uint64_t word) { return word & kStateMask; }
FW_HOST_DEVICE uint64_t with_state(uint64_t word, uint64_t state) {
  return (word & ~kStateMask) | state;
}
FW_HOST_DEVICE uint64_t line_of(uint64_t word) { return word & tag::kLineMask; }
FW_HOST_DEVICE uint32_t stamp_of(uint64_t word) {
  return uint32_t((word >> tag::kLineBits) & kStampMask);
}
FW_HOST_DEVICE uint64_t entering(uint64_t line, uint32_t stamp) {
  return kEntering | (stamp & kStampMask) << tag::kLineBits | line;
}
// The arrivals between a stamp and `now`. Wrong after 2^24 arrivals, which only costs a line its
// place.
FW_HOST_DEVICE uint32_t age(uint32_t now, uint32_t stamp) {
  return uint32_t((now - stamp) & kStampMask);
}

// The first place of a subset.
FW_HOST_DEVICE uint64_t first_of(const host_tier& t, uint32_t ways, uint64_t set, uint64_t round) {
  const uint64_t subset = t.subsets == 1 ? 0 : round % t.subsets;
  return (set * t.subsets + subset) * ways;
}

// Looks for `line` in its subset. Returns kHeld and sets `place`; kEntering while the line is being
// copied in; kEmpty if the tier does not have it. One lane, with the set's lock.
FW_DEVICE uint64_t find(const host_tier& t, uint32_t ways, uint64_t first, uint64_t line,
                        uint32_t& place) {
  for (uint32_t way = 0; way < ways; way++) {
    const uint64_t word = atomic::load_relaxed(&t.tags[first + way]);
    const uint64_t state = state_of(word);
    if (line_of(word) != line || (state != kHeld && state != kEntering)) continue;
    place = uint32_t(first + way);
    // The data was stored before the word became HELD. `open_sets` has the fence that acquires it.
    return state;
  }
  return kEmpty;
}

// The latest stamp of a subset. One lane, with the set's lock.
FW_DEVICE uint32_t newest_of(const host_tier& t, uint32_t ways, uint64_t first) {
  uint32_t newest = 0;
  bool seen_any = false;
  for (uint32_t way = 0; way < ways; way++) {
    const uint64_t word = atomic::load_relaxed(&t.tags[first + way]);
    if (state_of(word) == kEmpty) continue;
    const uint32_t stamp = stamp_of(word);
    // The later of two stamps is less than half a turn ahead of the other.
    if (!seen_any || age(stamp, newest) <= kStampMask / 2) newest = stamp;
    seen_any = true;
  }
  return newest;
}

// Gives `place`, which is empty or ours, to `line`, which leaves its frame.
FW_DEVICE void enter_at(const host_tier& t, uint32_t ways, uint64_t first, uint64_t line,
                        uint32_t place) {
  atomic::store_relaxed(&t.tags[place], entering(line, newest_of(t, ways, first) + 1));
}

// Takes a place for `line`: an empty one, or that of the oldest line. Returns kNoTierWay if all are
// being copied. One lane, with the set's lock.
FW_DEVICE uint32_t enter(const host_tier& t, uint32_t ways, uint64_t first, uint64_t line) {
  const uint32_t newest = newest_of(t, ways, first);
  uint32_t chosen = kNoTierWay;
  uint32_t oldest = 0;
  for (uint32_t way = 0; way < ways; way++) {
    const uint64_t word = atomic::load_relaxed(&t.tags[first + way]);
    const uint64_t state = state_of(word);
    if (state != kEmpty && state != kHeld) continue;
    const uint32_t worth = state == kEmpty ? ~uint32_t(0) : age(newest, stamp_of(word));
    if (chosen != kNoTierWay && worth <= oldest) continue;
    chosen = uint32_t(first + way);
    oldest = worth;
  }
  if (chosen == kNoTierWay) return chosen;
  // The last copy into or out of the place has ended. `open_sets` has the fence that acquires it.
  atomic::store_relaxed(&t.tags[chosen], entering(line, newest + 1));
  return chosen;
}

FW_DEVICE void change(const host_tier& t, uint32_t place, uint64_t state) {
  const uint64_t word = atomic::load_relaxed(&t.tags[place]);
  // Release: the copies, by lanes that this lane has synchronised with, come first.
  atomic::store_release(&t.tags[place],
                        state == kEmpty ? uint64_t(kEmpty) : with_state(word, state));
}

FW_DEVICE char* frame_of(const host_tier& t, uint32_t line_shift, uint32_t place) {
  return t.frames + (uint64_t(place) << line_shift);
}

}  // namespace tier

}  // namespace fw::cache
