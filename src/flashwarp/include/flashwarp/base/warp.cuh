// Warp collectives over the lanes in a mask. A warp has 32 lanes on the GPU and one on the CPU;
// base/simulator/warp.cuh has the simulator's version.
//
// Exactly the lanes in `mask` call a function that takes one, together.
#pragma once

#include "flashwarp/base/atomic.cuh"

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
// Makes `mask`, which has the lane's own bit, a value of each lane. The assembler assumes that the
// result of a vote is the same in all lanes that run together. But groups of lanes with different
// masks may run together for a while, and one mask for both would mix them in a collective.
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

// This warp's share of `items`, `batch` at a time. On the GPU the warps interleave. On the CPU each
// thread has one contiguous part, so that no two threads store to one page of the caller's buffer:
// both would fault on a new page, and the operating system would clear it twice.
FW_DEVICE share share_of(uint64_t items, uint32_t batch) {
  if constexpr (kWarpWidth > 1) {
    return {uint64_t(index()) * batch, items, uint64_t(count()) * batch};
  } else {
    const uint64_t part = (items + count() - 1) / count();
    const uint64_t begin = part * index();
    return {begin, begin + part < items ? begin + part : items, batch};
  }
}

// A thread's way through the items of a launch on the CPU device, `step` at a time: first its own
// contiguous part, then what other threads have left of theirs. So a launch ends early although
// some of its threads begin late: to wake a thread takes as long as to copy some hundred KiB. A
// kernel that takes its items so does nothing else, because a thread may come when all are taken.
class item_loop {
 public:
  FW_DEVICE item_loop(uint64_t items, uint64_t step)
      : items_(items), step_(step), part_((items + count() - 1) / count()) {}

  // The end of the part that the last items are of.
  FW_DEVICE uint64_t part_end() const { return part_end_; }

  // Takes the next items, [begin, end). Returns false if there are none left.
  FW_DEVICE bool next(uint64_t& begin, uint64_t& end) {
    for (; turn_ < count(); turn_++) {
      const uint32_t whose = (index() + turn_) % count();
      const uint64_t first = part_ * whose;
      part_end_ = first + part_ < items_ ? first + part_ : items_;
      uint64_t* taken = base::taken_of(whose);
      if (taken == nullptr) turn_ = count();
      // Look first: an addition would take the word from the threads that still find items.
      if (taken != nullptr && atomic::load_relaxed(taken) >= part_) continue;
      // Relaxed: the items are the caller's, who waits for all threads that take some.
      begin = taken == nullptr ? first : first + atomic::add_relaxed(taken, step_);
      end = taken == nullptr || begin + step_ > part_end_ ? part_end_ : begin + step_;
      if (begin < part_end_) return true;
    }
    return false;
  }

 private:
  const uint64_t items_;
  const uint64_t step_;
  const uint64_t part_;
  uint64_t part_end_ = 0;
  uint32_t turn_ = 0;
};

// The rank of this lane among the set bits of `members` (lanes below it).
FW_DEVICE uint32_t rank_in(uint32_t members) {
  return base::popcount(members & ((1u << lane()) - 1u));
}

}  // namespace fw::warp
