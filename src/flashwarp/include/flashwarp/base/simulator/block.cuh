// Blocks of the simulator: one warp, or as many as the scenario gives them.
#pragma once

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"

namespace fw::block {

inline uint32_t warp_count() { return simulator::here->block_warps; }
inline uint32_t warp_rank() { return warp::index() % warp_count(); }
inline uint32_t count() { return warp::count() / warp_count(); }

// A barrier of all threads of the block. Returns for how many of them the predicate holds.
inline uint32_t count_of(bool predicate) {
  warp::sync(warp::kFullMask);
  uint32_t all = base::popcount(warp::ballot(warp::kFullMask, predicate));
  const uint32_t warps = warp_count();
  if (warps == 1) return all;
  if (warp::lane() == 0) {
    simulator::block_barrier& b = *simulator::here->barrier;
    atomic::fence();
    // The place of the barrier after the next one is free: who has used it last has gone on.
    const uint64_t number = atomic::load_relaxed(&b.arrived) / warps;
    atomic::add_relaxed(&b.counts[number % 4], uint64_t(all));
    if (atomic::add_release(&b.arrived, uint64_t(1)) % warps == 0) {
      atomic::store_relaxed(&b.counts[(number + 2) % 4], uint64_t(0));
    }
    while (atomic::load_acquire(&b.arrived) / warps == number) base::pause(1);
    all = uint32_t(atomic::load_relaxed(&b.counts[number % 4]));
  }
  all = warp::broadcast(warp::kFullMask, all, 0);
  warp::sync(warp::kFullMask);
  return all;
}
inline bool any(bool predicate) { return count_of(predicate) != 0; }
inline void sync() { count_of(false); }
// Bit by bit: the simulator's blocks share nothing but the barrier.
inline uint64_t broadcast(uint64_t value) {
  const bool first = warp_rank() == 0 && warp::lane() == 0;
  uint64_t result = 0;
  for (uint32_t bit = 0; bit < 64; bit++) {
    if (any(first && ((value >> bit) & 1) != 0)) result |= uint64_t(1) << bit;
  }
  return result;
}

}  // namespace fw::block
