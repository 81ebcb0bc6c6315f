// The warps of a block and their barrier. On the CPU and in the simulator a block is one warp.
#pragma once

#include "flashwarp/base/warp.cuh"

namespace fw::block {

#if FW_ON_GPU

FW_DEVICE void sync() { __syncthreads(); }
FW_DEVICE uint32_t warp_rank() { return threadIdx.x / 32; }
FW_DEVICE uint32_t warp_count() { return blockDim.x / 32; }

#else

inline void sync() { warp::sync(warp::kFullMask); }
inline uint32_t warp_rank() { return 0; }
inline uint32_t warp_count() { return 1; }

#endif

}  // namespace fw::block
