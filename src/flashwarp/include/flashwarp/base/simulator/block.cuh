// Blocks of the simulator: one warp, or as many as the scenario gives them.
#pragma once

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"

namespace fw::block {

inline uint32_t warp_count() { return simulator::here->block_warps; }
inline uint32_t warp_rank() { return warp::index() % warp_count(); }
inline uint32_t count() { return warp::count() / warp_count(); }

inline uint32_t rank() { return warp_rank() * base::kWarpWidth + warp::lane(); }
inline uint32_t size() { return warp_count() * base::kWarpWidth; }

// A barrier of all threads of the block. Returns the sum of its warps' values, which all lanes of a
// warp pass.
inline uint64_t sum_of(uint64_t value) {
  lanes::all().sync();
  const uint32_t warps = warp_count();
  if (warps == 1) return value;
  uint64_t all = 0;
  if (warp::lane() == 0) {
    simulator::block_barrier& b = *simulator::here->barrier;
    atomic::fence();
    // The place of the barrier after the next one is free: who has used it last has gone on.
    const uint64_t number = atomic::load_relaxed(&b.arrived) / warps;
    atomic::add_relaxed(&b.counts[number % 4], value);
    if (atomic::add_release(&b.arrived, uint64_t(1)) % warps == 0) {
      atomic::store_relaxed(&b.counts[(number + 2) % 4], uint64_t(0));
    }
    while (atomic::load_acquire(&b.arrived) / warps == number) base::pause(1);
    all = atomic::load_relaxed(&b.counts[number % 4]);
  }
  all = lanes::all().broadcast(all, 0);
  lanes::all().sync();
  return all;
}
// For how many threads of the block the predicate holds.
inline uint32_t count_of(bool predicate) {
  return uint32_t(sum_of(lanes::all().ballot(predicate).count()));
}
inline uint64_t broadcast(uint64_t value) {
  const uint64_t own = lanes::all().broadcast(value, 0);
  return sum_of(warp_rank() == 0 ? own : 0);
}
inline bool any(bool predicate) { return count_of(predicate) != 0; }
inline void sync() { count_of(false); }

}  // namespace fw::block
