// The warps of a block and their barrier. On the CPU a block is one warp; base/simulator/block.cuh
// has the simulator's version.
#pragma once

#include "flashwarp/base/warp.cuh"

#if defined(FW_SIMULATOR)
#include "flashwarp/base/simulator/block.cuh"
#endif

namespace fw::block {

#if FW_ON_GPU

FW_DEVICE void sync() { __syncthreads(); }
FW_DEVICE uint32_t warp_rank() { return threadIdx.x / 32; }
FW_DEVICE uint32_t warp_count() { return blockDim.x / 32; }
FW_DEVICE uint32_t count() { return gridDim.x * gridDim.y * gridDim.z; }
// Barriers of all threads of the block. `any`: whether the predicate holds for one of them;
// `count_of`: for how many.
FW_DEVICE bool any(bool predicate) { return __syncthreads_or(predicate) != 0; }
FW_DEVICE uint32_t count_of(bool predicate) { return __syncthreads_count(predicate); }
// The thread's place in its block, of any shape, and the block's threads.
FW_DEVICE uint32_t rank() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
FW_DEVICE uint32_t size() { return blockDim.x * blockDim.y * blockDim.z; }
// Returns the value of the block's first thread, behind a barrier.
FW_DEVICE uint64_t broadcast(uint64_t value) {
  FW_SHARED uint64_t shared;
  if (rank() == 0) shared = value;
  sync();
  value = shared;
  sync();
  return value;
}

#elif !defined(FW_SIMULATOR)

inline void sync() {}
inline uint32_t warp_rank() { return 0; }
inline uint32_t warp_count() { return 1; }
inline uint32_t count() { return warp::count(); }
inline bool any(bool predicate) { return predicate; }
inline uint32_t count_of(bool predicate) { return predicate ? 1 : 0; }
inline uint32_t rank() { return 0; }
inline uint32_t size() { return 1; }
inline uint64_t broadcast(uint64_t value) { return value; }

#endif

}  // namespace fw::block
