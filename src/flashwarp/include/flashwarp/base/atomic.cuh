// Atomic loads, stores, read-modify-writes and fences, named by order and scope.
//
// Only this header's parts spell memory orders: base/gpu/atomic.cuh in inline PTX, base/cpu/ in
// compiler builtins, base/simulator/ in calls of the simulator. The scope is the device (`.gpu`);
// with the suffix `_system` it includes the host and its controller. The types are 32-bit and
// 64-bit unsigned integers, and `word16` where the name says 16.
#pragma once

#include "flashwarp/base/platform.cuh"

namespace fw::atomic {

// Sixteen bytes: the widest access of one lane.
struct alignas(16) word16 {
  uint32_t x, y, z, w;
};

// Two adjacent 64-bit words. Each is loaded atomically; the pair is not.
struct pair64 {
  uint64_t first, second;
};

}  // namespace fw::atomic

#if FW_ON_GPU
#include "flashwarp/base/gpu/atomic.cuh"
#elif defined(FW_SIMULATOR)
#include "flashwarp/base/simulator/atomic.cuh"
#else
#include "flashwarp/base/cpu/atomic.cuh"
#endif

namespace fw::atomic {

// One test-and-set lock word for short metadata changes; never held across an I/O wait.
FW_DEVICE bool try_lock(uint32_t* lock) {
  // Look first: a failed compare-and-swap would take the cache line from the lock's holder.
  return load_relaxed(lock) == 0 && cas_acq_rel(lock, uint32_t(0), uint32_t(1));
}
FW_DEVICE void unlock(uint32_t* lock) { store_release(lock, uint32_t(0)); }

#if !FW_ON_GPU
// Hosts add floating-point numbers by compare-and-swap. In each round one of the adding threads
// succeeds.
template <typename Number, typename Bits>
inline Number add_number(Number* p, Number v) {
  static_assert(sizeof(Number) == sizeof(Bits));
  Bits* word = reinterpret_cast<Bits*>(p);
  Bits old = load_relaxed(word);
  while (true) {
    const Number before = __builtin_bit_cast(Number, old);
    if (cas_acq_rel(word, old, __builtin_bit_cast(Bits, Number(before + v)))) return before;
    old = load_relaxed(word);
  }
}
inline float add_relaxed(float* p, float v) { return add_number<float, uint32_t>(p, v); }
inline double add_relaxed(double* p, double v) { return add_number<double, uint64_t>(p, v); }
#endif

// Adds to a number of a kernel author's type. Returns the old value.
template <typename T>
FW_DEVICE T add(T* p, T v) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic additions are of 32 or 64 bits");
  if constexpr (T(0.5f) != T(0)) {
    return add_relaxed(p, v);
  } else if constexpr (sizeof(T) == 4) {
    return T(add_relaxed(reinterpret_cast<uint32_t*>(p), uint32_t(v)));
  } else {
    return T(add_relaxed(reinterpret_cast<uint64_t*>(p), uint64_t(v)));
  }
}

}  // namespace fw::atomic
