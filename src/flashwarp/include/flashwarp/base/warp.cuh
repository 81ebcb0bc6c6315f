// The lanes of a warp: where a thread is among them, and sets of them. A warp has 32 lanes on the
// GPU and one on the CPU; base/simulator/warp.cuh has the simulator's version.
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
FW_DEVICE uint32_t index() { return base::thread_index() / 32; }
FW_DEVICE uint32_t count() { return base::thread_count() / 32; }
// All lanes of a warp, as bits.
inline constexpr uint32_t kFullMask = 0xffffffffu;

// Makes `mask`, which has the lane's own bit, a value of each lane. The assembler assumes that the
// result of a vote is the same in all lanes that run together. But groups of lanes with different
// masks may run together for a while, and one mask for both would mix them in a collective.
FW_DEVICE uint32_t own(uint32_t mask) {
  uint32_t bit;
  asm("mov.u32 %0, %%lanemask_eq;" : "=r"(bit));
  return mask | bit;
}

namespace primitive {

FW_DEVICE uint32_t active(base::site) { return own(__activemask()); }
FW_DEVICE void sync(uint32_t mask, base::site) { __syncwarp(own(mask)); }
FW_DEVICE uint32_t ballot(uint32_t mask, bool predicate, base::site) {
  return __ballot_sync(own(mask), predicate);
}
FW_DEVICE uint32_t match(uint32_t mask, uint64_t value, base::site) {
  return __match_any_sync(own(mask), value);
}
template <typename T>
FW_DEVICE T take(uint32_t mask, T value, uint32_t source, base::site) {
  return __shfl_sync(own(mask), value, source);
}

}  // namespace primitive

#elif !defined(FW_SIMULATOR)

inline uint32_t lane() { return 0; }
inline uint32_t index() { return base::thread_index(); }
inline uint32_t count() { return base::thread_count(); }
inline constexpr uint32_t kFullMask = 1u;

namespace primitive {

inline uint32_t active(base::site) { return 1; }
inline void sync(uint32_t, base::site) {}
inline uint32_t ballot(uint32_t, bool predicate, base::site) { return predicate ? 1u : 0u; }
inline uint32_t match(uint32_t, uint64_t, base::site) { return 1; }
template <typename T>
inline T take(uint32_t, T value, uint32_t, base::site) {
  return value;
}

}  // namespace primitive

#endif

}  // namespace fw::warp

namespace fw {

// A set of lanes of one warp.
class lanes {
 public:
  FW_DEVICE constexpr lanes() {}
  FW_DEVICE constexpr explicit lanes(uint32_t bits) : bits_(bits) {}

  FW_DEVICE static constexpr lanes all() { return lanes(warp::kFullMask); }
  FW_DEVICE static constexpr lanes of(uint32_t lane) { return lanes(1u << lane); }

  FW_DEVICE explicit operator bool() const { return bits_ != 0; }
  FW_DEVICE uint32_t bits() const { return bits_; }
  FW_DEVICE uint32_t count() const { return base::popcount(bits_); }
  FW_DEVICE bool has(uint32_t lane) const { return ((bits_ >> lane) & 1) != 0; }
  // The lowest lane; the set must not be empty.
  FW_DEVICE uint32_t leader() const { return base::lowest_bit(bits_); }
  // That lane alone; no lane of an empty set.
  FW_DEVICE lanes first() const { return lanes(bits_ & (~bits_ + 1)); }
  FW_DEVICE lanes below(uint32_t lane) const { return lanes(bits_ & ((1u << lane) - 1u)); }

  // Whether the calling lane is in the set, and leads it; and how many of the set are below it.
  FW_DEVICE bool mine() const { return has(warp::lane()); }
  FW_DEVICE bool leads() const { return warp::lane() == leader(); }
  FW_DEVICE uint32_t rank() const { return below(warp::lane()).count(); }

  FW_DEVICE lanes operator|(lanes other) const { return lanes(bits_ | other.bits_); }
  FW_DEVICE lanes operator&(lanes other) const { return lanes(bits_ & other.bits_); }
  FW_DEVICE lanes operator-(lanes other) const { return lanes(bits_ & ~other.bits_); }
  FW_DEVICE lanes& operator|=(lanes other) { return *this = *this | other; }
  FW_DEVICE lanes& operator-=(lanes other) { return *this = *this - other; }
  FW_DEVICE bool operator==(const lanes&) const = default;

  // Collectives: exactly the lanes of the set call, together.
  FW_DEVICE void sync(FW_SITE) const { warp::primitive::sync(bits_, at); }
  // The lanes for which the predicate holds; and whether there is one.
  FW_DEVICE lanes ballot(bool predicate, FW_SITE) const {
    return lanes(warp::primitive::ballot(bits_, predicate, at));
  }
  FW_DEVICE bool any(bool predicate, FW_SITE) const { return bool(ballot(predicate, at)); }
  // The lanes with the value of the calling lane.
  FW_DEVICE lanes match(uint64_t value, FW_SITE) const {
    return lanes(warp::primitive::match(bits_, value, at));
  }
  // The value of another lane of the set. Each lane names its own source.
  template <typename T>
  FW_DEVICE T take(T value, uint32_t source, FW_SITE) const {
    return T(warp::primitive::take(bits_, value, source, at));
  }
  // The value of one lane: of the leader, or of the one that all name.
  template <typename T>
  FW_DEVICE T broadcast(T value, FW_SITE) const {
    return take(value, leader(), at);
  }
  template <typename T>
  FW_DEVICE T broadcast(T value, uint32_t source, FW_SITE) const {
    return take(value, source, at);
  }

  // The lanes from the lowest on: `for (uint32_t lane : set)`.
  class iterator {
   public:
    FW_DEVICE explicit iterator(uint32_t rest) : rest_(rest) {}
    FW_DEVICE uint32_t operator*() const { return base::lowest_bit(rest_); }
    FW_DEVICE iterator& operator++() {
      rest_ &= rest_ - 1;
      return *this;
    }
    FW_DEVICE bool operator!=(const iterator& end) const { return rest_ != end.rest_; }

   private:
    uint32_t rest_;
  };
  FW_DEVICE iterator begin() const { return iterator(bits_); }
  FW_DEVICE iterator end() const { return iterator(0); }

 private:
  uint32_t bits_ = 0;
};

namespace warp {

// The lanes that run together now.
FW_DEVICE lanes active(FW_SITE) { return lanes(primitive::active(at)); }

// For kernels that name lanes by their bits, as CUDA does: all of them call, together.
FW_DEVICE void sync(uint32_t mask = kFullMask, FW_SITE) { lanes(mask).sync(at); }

// The items of a loop that a warp takes: begin, begin + stride and so on, below end.
struct share {
  uint64_t begin, end, stride;
};

// This warp's share of `items`, `bundle` at a time. On the GPU the warps interleave. On the CPU
// each thread has one contiguous part, so that no two threads store to one page of the caller's
// buffer: both would fault on a new page, and the operating system would clear it twice.
FW_DEVICE share share_of(uint64_t items, uint32_t bundle) {
  if constexpr (kWarpWidth > 1) {
    return {uint64_t(index()) * bundle, items, uint64_t(count()) * bundle};
  } else {
    const uint64_t part = (items + count() - 1) / count();
    const uint64_t begin = part * index();
    return {begin, begin + part < items ? begin + part : items, bundle};
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

}  // namespace warp

}  // namespace fw
