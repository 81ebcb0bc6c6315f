// Warp collectives over the lanes named by a mask; a warp is 32 lanes on the GPU and one on the
// CPU; base/simulator/warp.cuh has the simulator's.
//
// Every function that takes `mask` must be called by exactly the lanes in it, together.
#pragma once

#include "flashwarp/base/platform.cuh"

#if defined(FW_SIMULATOR)
#include "flashwarp/base/simulator/warp.cuh"
#endif

namespace fw::warp {

using base::kWarpWidth;

#if FW_ON_GPU

FW_DEVICE uint32_t lane() {
  uint32_t l;
  asm("mov.u32 %0, %%laneid;" : "=r"(l));
  return l;
}
// `mask`, which holds the lane's own bit, as a value of the lane. The assembler takes what came
// from a vote for the same in all lanes that run together. But groups of lanes that hold different
// masks meet at times and run together for a while; a collective with one mask for both would mix
// them.
FW_DEVICE uint32_t own(uint32_t mask) {
  uint32_t bit;
  asm("mov.u32 %0, %%lanemask_eq;" : "=r"(bit));
  return mask | bit;
}

FW_DEVICE uint32_t active() { return own(__activemask()); }
FW_DEVICE void sync(uint32_t mask) { __syncwarp(own(mask)); }
FW_DEVICE uint32_t ballot(uint32_t mask, bool predicate) {
  return __ballot_sync(own(mask), predicate);
}
FW_DEVICE uint32_t match(uint32_t mask, uint64_t value) {
  return __match_any_sync(own(mask), value);
}
template <typename T>
FW_DEVICE T broadcast(uint32_t mask, T value, uint32_t source) {
  return __shfl_sync(own(mask), value, source);
}
// Each lane names its own source lane; all sources must be in the mask.
template <typename T>
FW_DEVICE T take(uint32_t mask, T value, uint32_t source) {
  return __shfl_sync(own(mask), value, source);
}
FW_DEVICE uint32_t index() { return base::thread_index() / 32; }
FW_DEVICE uint32_t count() { return base::thread_count() / 32; }
// All lanes of a warp, as a mask.
inline constexpr uint32_t kFullMask = 0xffffffffu;

#elif !defined(FW_SIMULATOR)

inline uint32_t lane() { return 0; }
inline uint32_t active() { return 1; }
inline void sync(uint32_t) {}
inline uint32_t ballot(uint32_t, bool predicate) { return predicate ? 1u : 0u; }
inline uint32_t match(uint32_t, uint64_t) { return 1; }
template <typename T>
inline T broadcast(uint32_t, T value, uint32_t) {
  return value;
}
template <typename T>
inline T take(uint32_t, T value, uint32_t) {
  return value;
}
inline uint32_t index() { return base::thread_index(); }
inline uint32_t count() { return base::thread_count(); }
inline constexpr uint32_t kFullMask = 1u;

#endif

#if !defined(FW_SIMULATOR)
FW_DEVICE bool any(uint32_t mask, bool predicate) { return ballot(mask, predicate) != 0; }
#endif

// The items of a loop that a warp takes: begin, begin + stride and so on, below end.
struct share {
  uint64_t begin, end, stride;
};

// What this warp takes of `items`, `batch` at a time. Wide warps pass over them side by side. A
// thread that is a warp of its own has a part of its own, so that no two store to one page of the
// caller's buffer: both would fault on a new page, and the kernel would clear it twice.
FW_DEVICE share share_of(uint64_t items, uint32_t batch) {
  if constexpr (kWarpWidth > 1) {
    return {uint64_t(index()) * batch, items, uint64_t(count()) * batch};
  } else {
    const uint64_t part = (items + count() - 1) / count();
    const uint64_t begin = part * index();
    return {begin, begin + part < items ? begin + part : items, batch};
  }
}

// The rank of this lane among the set bits of `members` (lanes below it).
FW_DEVICE uint32_t rank_in(uint32_t members) {
  return base::popcount(members & ((1u << lane()) - 1u));
}

}  // namespace fw::warp
