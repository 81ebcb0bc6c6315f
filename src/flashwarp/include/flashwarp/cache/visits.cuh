// Visits: what a warp does with the queues of an array that is not its own, but on the same cache.
//
// A waiting warp helps its neighbours, and a fill may have to write a neighbour's dirty line back.
// The host frees an array's queues when the array closes; it cannot know who is there, since
// kernels may be launched without it. So a visitor announces itself, then looks whether the array
// is still attached; the host marks the array as gone, then waits until no visitor is left
// (`Cache.withdraw`). In both the store comes before the look, behind a sequential fence, so one of
// the two sees the other. The words lie in the cache's table, which outlives its arrays.
#pragma once

#include "flashwarp/cache/set_associative.cuh"

namespace fw::cache {

// Whether two entries are of one array: a copy of an entry has its queues.
FW_DEVICE bool same_array(const volume& a, const volume& b) { return a.queues == b.queues; }

// Lets go of a visit. Release: what the visitor did with the queues is over.
FW_DEVICE void end_visit(volume& v) { atomic::add_release(&v.visitors, ~0u); }

// By one lane. False when the array is gone; then there is nothing to end, and its queues, counters
// and error record must not be touched.
FW_DEVICE bool begin_visit(volume& v) {
  atomic::add_relaxed(&v.visitors, 1u);
  // Store-load order between the announcement and the look; the host's mark and its look at
  // `visitors` are the other side.
  atomic::fence_sequential();
  // Acquire: what the host wrote to the entry before it marked it as attached.
  if (atomic::load_acquire(&v.attached) != 0) return true;
  end_visit(v);
  return false;
}

// The same for all lanes of `mask` together.
FW_DEVICE bool begin_visit(volume& v, uint32_t mask) {
  const uint32_t leader = base::lowest_bit(mask);
  const bool inside = warp::lane() == leader && begin_visit(v);
  const bool all = warp::broadcast(mask, inside, leader);
  // The leader has acquired the entry for the others.
  warp::sync(mask);
  return all;
}
FW_DEVICE void end_visit(volume& v, uint32_t mask) {
  // All lanes have left before the one that says so.
  warp::sync(mask);
  if (warp::lane() == base::lowest_bit(mask)) end_visit(v);
}

}  // namespace fw::cache
