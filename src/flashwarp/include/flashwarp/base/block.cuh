// The warps of a block and their barrier. On the CPU and in the simulator a block is one warp.
#pragma once

#include "flashwarp/base/warp.cuh"

namespace fw::block {

#if FW_ON_GPU

FW_DEVICE void sync() { __syncthreads(); }
FW_DEVICE uint32_t warp_rank() { return threadIdx.x / 32; }
FW_DEVICE uint32_t warp_count() { return blockDim.x / 32; }
FW_DEVICE uint32_t count() { return gridDim.x; }
// Barriers of all threads of the block. `any`: whether the predicate holds for one of them;
// `count_of`: for how many.
FW_DEVICE bool any(bool predicate) { return __syncthreads_or(predicate) != 0; }
FW_DEVICE uint32_t count_of(bool predicate) { return __syncthreads_count(predicate); }

#else

inline void sync() { warp::sync(warp::kFullMask); }
inline uint32_t warp_rank() { return 0; }
inline uint32_t warp_count() { return 1; }
inline uint32_t count() { return warp::count(); }
inline bool any(bool predicate) {
  sync();
  return warp::any(warp::kFullMask, predicate);
}
inline uint32_t count_of(bool predicate) {
  sync();
  return base::popcount(warp::ballot(warp::kFullMask, predicate));
}

#endif

}  // namespace fw::block
