// Claims frames, and moves lines between them and the host tier: victims out, lines back in.
//
// Nothing here waits: the caller repeats a claim that fails. A warp whose claim moves a line copies
// it at once, because other warps may wait for it.
#pragma once

#include "flashwarp/cache/set_associative.cuh"

namespace fw::cache {

// The addresses of one lane's frame and of its two places in the tier.
struct tier_move {
  uint64_t frame;
  uint64_t from;
  uint64_t to;
};
FW_DEVICE tier_move move_of(const line_cache& c, lanes here, const claim& mine, uint32_t source) {
  const uint64_t way = here.broadcast(mine.way, source);
  const uint32_t from = here.broadcast(mine.tier_from, source);
  const uint32_t to = here.broadcast(mine.tier_to, source);
  const uint32_t shift = c.geometry.line_shift;
  return {reinterpret_cast<uint64_t>(frame_of(c.geometry, way)),
          reinterpret_cast<uint64_t>(tier::frame_of(c.tier, shift, from)),
          reinterpret_cast<uint64_t>(tier::frame_of(c.tier, shift, to))};
}

// Swaps the bytes of a frame and of a place. No other warp uses either.
FW_DEVICE void swap_lines(lanes here, uint64_t frame, uint64_t place, uint64_t bytes) {
  using word = atomic::raw<16>;
  const uint64_t step = uint64_t(here.count()) * 16;
  for (uint64_t at = uint64_t(here.rank()) * 16; at < bytes; at += step) {
    char* a = reinterpret_cast<char*>(frame + at);
    char* b = reinterpret_cast<char*>(place + at);
    const atomic::word16 out = word::load(a);
    const atomic::word16 in = word::load_stream(b);
    word::store(a, in);
    word::store_plain(b, out);
  }
}

// Carries out the moves of the lanes' claims. A line in the tier comes into its frame if it is
// `wanted`, and is dropped otherwise (the lane overwrites it whole). The frames stay BUSY. Returns
// the lanes whose lines came from the tier.
FW_DEVICE_NOINLINE lanes move_tier_lines(line_cache& c, lanes here, const claim& mine,
                                         bool wanted) {
  const bool leaves = mine.tier_from != kNoTierWay;
  const bool enters = mine.tier_to != kNoTierWay;
  const lanes out = here.ballot(enters);
  const lanes in = here.ballot(leaves && wanted);
  const lanes both = in & here.ballot(leaves && mine.tier_from == mine.tier_to);
  const uint64_t bytes = line_bytes(c.geometry);
  // Each lane has acquired its own victim and place; now all lanes copy all of them.
  if (out | in) here.sync();
  for (const uint32_t source : out | in) {
    const tier_move m = move_of(c, here, mine, source);
    if (both.has(source)) {
      swap_lines(here, m.frame, m.to, bytes);
      continue;
    }
    // The victim first, because the line takes its frame.
    if (out.has(source)) warp::copy<warp::source::kFrame>(here, m.to, m.frame, bytes);
    if ((in & out).has(source)) here.sync();
    if (in.has(source)) warp::copy<warp::source::kStream>(here, m.frame, m.from, bytes);
  }
  // The copies of all lanes come before other warps use the places, and before the frames' fills.
  if (out | in) here.sync();
  // A line leaves the tier before it is published, because stores may follow at once.
  if (leaves && mine.tier_from != mine.tier_to) tier::change(c.tier, mine.tier_from, tier::kEmpty);
  if (enters) tier::change(c.tier, mine.tier_to, tier::kHeld);
  return in;
}

// Asks for a frame for the line of each lane that `asks`; lanes must not ask for the same line. All
// lanes of `here` call together. Never waits. `kept` gets the lanes whose lines came into their
// claimed frames from the host tier; only lanes with `wanted` get theirs.
template <typename Policy>
FW_DEVICE claim claim_lines(line_cache& c, const geometry& g, lanes here, bool asks, uint64_t line,
                            purpose why, bool wanted, lanes& kept) {
  claim mine;
  if (asks) mine = claim_frame<Policy>(c, g, line, why);
  open_sets(here, mine);
  kept = c.tier_ways != 0 ? move_tier_lines(c, here, mine, wanted) : lanes();
  return mine;
}

}  // namespace fw::cache
