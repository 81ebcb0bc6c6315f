// Claiming frames, with what that moves between them and the host tier: victims out, lines back in.
//
// Nothing here waits: a claim that cannot be had now is asked for again. A warp that has put a
// victim's place on its way copies at once, since others may be waiting for it.
#pragma once

#include "flashwarp/cache/set_associative.cuh"

namespace fw::cache {

// Copies lines that made room to the host tier, one for each lane whose claim has a place there.
FW_DEVICE_NOINLINE void keep_victims(page_cache& c, uint32_t mask, const claim& mine) {
  const bool keeps = mine.tier_to != kNoTierWay;
  const uint32_t members = warp::ballot(mask, keeps);
  if (members == 0) return;
  // Each lane has acquired its own victim's frame and its place; now all lanes copy all of them.
  warp::sync(mask);
  for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
    const uint32_t source = base::lowest_bit(rest);
    const uint64_t way = warp::broadcast(mask, mine.way, source);
    const uint32_t place = warp::broadcast(mask, mine.tier_to, source);
    warp::copy<warp::source::kFrame>(
        mask, reinterpret_cast<uint64_t>(tier::frame_of(c.tier, c.shape.line_shift, place)),
        reinterpret_cast<uint64_t>(frame_of(c.shape, way)), line_bytes(c.shape));
  }
  // The copies of all lanes before HELD, and before anybody fills the frames.
  warp::sync(mask);
  if (keeps) tier::change(c.tier, mine.tier_to, tier::kHeld);
}

// Asks for a frame for the line of each lane that `asks`; lanes must not ask for the same line. All
// lanes of `mask` call together. Never waits. Whoever gets a claim with `tier_from` must call
// promote_lines.
template <typename Policy>
FW_DEVICE claim claim_lines(page_cache& c, uint32_t mask, bool asks, uint64_t line,
                            bool prefetched) {
  claim mine;
  if (asks) mine = claim_frame<Policy>(c, line, prefetched);
  if (c.tier_ways != 0) keep_victims(c, mask, mine);
  return mine;
}

// Brings lines from the host tier into the frames that were claimed for them, for each lane whose
// claim has one there; those that are not `wanted`, since all of them will be overwritten, are
// dropped. The frames stay BUSY. Returns the lanes whose lines are there.
FW_DEVICE_NOINLINE uint32_t promote_lines(page_cache& c, uint32_t mask, const claim& mine,
                                          bool wanted) {
  const bool leaves = mine.tier_from != kNoTierWay;
  const uint32_t members = warp::ballot(mask, leaves && wanted);
  if (members != 0) {
    // Each lane has acquired its own line's data; now all lanes copy all of them.
    warp::sync(mask);
    // The tags went BUSY before these stores: a reader that sees a new byte finds its tag changed.
    atomic::fence();
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
      const uint32_t source = base::lowest_bit(rest);
      const uint64_t way = warp::broadcast(mask, mine.way, source);
      const uint32_t place = warp::broadcast(mask, mine.tier_from, source);
      warp::copy<warp::source::kStream>(
          mask, reinterpret_cast<uint64_t>(frame_of(c.shape, way)),
          reinterpret_cast<uint64_t>(tier::frame_of(c.tier, c.shape.line_shift, place)),
          line_bytes(c.shape));
    }
    warp::sync(mask);
  }
  // Before the line is published: from then on it can be stored to, and the copy here would be old.
  if (leaves) tier::change(c.tier, mine.tier_from, tier::kEmpty);
  return members;
}

}  // namespace fw::cache
