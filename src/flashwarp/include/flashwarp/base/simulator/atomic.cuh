// The atomic operations of the simulator; base/atomic.cuh says what each of them means.
#pragma once

#include "flashwarp/base/simulator/hooks.cuh"

namespace fw::atomic {

using simulator::fence_kind;
using simulator::order;
using simulator::scope;

template <typename T>
inline T load_relaxed(const T* p, FW_SITE) {
  return T(simulator::load(p, sizeof(T), order::kRelaxed, scope::kDevice, at));
}
template <typename T>
inline T load_acquire(const T* p, FW_SITE) {
  return T(simulator::load(p, sizeof(T), order::kAcquire, scope::kDevice, at));
}
template <typename T>
inline void store_relaxed(T* p, T v, FW_SITE) {
  simulator::store(p, v, sizeof(T), order::kRelaxed, scope::kDevice, at);
}
template <typename T>
inline void store_release(T* p, T v, FW_SITE) {
  simulator::store(p, v, sizeof(T), order::kRelease, scope::kDevice, at);
}
template <typename T>
inline void store_relaxed_system(T* p, T v, FW_SITE) {
  simulator::store(p, v, sizeof(T), order::kRelaxed, scope::kSystem, at);
}
inline void store_mmio(uint32_t* p, uint32_t v, FW_SITE) { store_relaxed_system(p, v, at); }
template <typename T>
inline T add_relaxed(T* p, T v, FW_SITE) {
  return T(simulator::add(p, v, sizeof(T), order::kRelaxed, at));
}
template <typename T>
inline T add_acquire(T* p, T v, FW_SITE) {
  return T(simulator::add(p, v, sizeof(T), order::kAcquire, at));
}
template <typename T>
inline T add_release(T* p, T v, FW_SITE) {
  return T(simulator::add(p, v, sizeof(T), order::kRelease, at));
}
template <typename T>
inline bool cas_acq_rel(T* p, T expected, T desired, FW_SITE) {
  return simulator::compare_and_swap(p, expected, desired, sizeof(T), order::kAcqRel, at);
}
inline bool cas_relaxed(uint64_t* p, uint64_t expected, uint64_t desired, FW_SITE) {
  return simulator::compare_and_swap(p, expected, desired, sizeof(*p), order::kRelaxed, at);
}
inline uint32_t or_acquire(uint32_t* p, uint32_t bits, FW_SITE) {
  return uint32_t(simulator::set_bits(p, bits, sizeof(*p), order::kAcquire, at));
}
inline uint32_t or_relaxed(uint32_t* p, uint32_t bits, FW_SITE) {
  return uint32_t(simulator::set_bits(p, bits, sizeof(*p), order::kRelaxed, at));
}
inline pair64 load_relaxed_pair(const uint64_t* p, FW_SITE) {
  return {load_relaxed(p, at), load_relaxed(p + 1, at)};
}
inline pair64 load_acquire_pair(const uint64_t* p, FW_SITE) {
  return {load_acquire(p, at), load_acquire(p + 1, at)};
}
template <typename T>
inline T load_relaxed_system(const T* p, FW_SITE) {
  return T(simulator::load(p, sizeof(T), order::kRelaxed, scope::kSystem, at));
}
// Loads the half that the controller stores last first. (A relaxed access may take either order.)
inline word16 load16_relaxed_system(const word16* p, FW_SITE) {
  const uint64_t* q = reinterpret_cast<const uint64_t*>(p);
  const uint64_t high = simulator::load(q + 1, 8, order::kRelaxed, scope::kSystem, at);
  const uint64_t low = simulator::load(q, 8, order::kRelaxed, scope::kSystem, at);
  return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}
inline void or_relaxed(uint64_t* p, uint64_t bits, FW_SITE) {
  simulator::set_bits(p, bits, sizeof(*p), order::kRelaxed, at);
}
inline void and_relaxed(uint64_t* p, uint64_t bits, FW_SITE) {
  simulator::keep_bits(p, bits, sizeof(*p), order::kRelaxed, at);
}

inline void fence(FW_SITE) { simulator::fence(fence_kind::kDevice, at); }
inline void fence_acquire(FW_SITE) { simulator::fence(fence_kind::kAcquire, at); }
inline void fence_sequential(FW_SITE) { simulator::fence(fence_kind::kSequential, at); }
inline void fence_system(FW_SITE) { simulator::fence(fence_kind::kSystem, at); }
inline void fence_sequential_system(FW_SITE) {
  simulator::fence(fence_kind::kSequentialSystem, at);
}

// Values of four bytes, or of a multiple of eight.
template <typename T>
inline T load_plain(const T* p, FW_SITE) {
  constexpr uint32_t kStep = sizeof(T) < 8 ? sizeof(T) : 8;
  static_assert(sizeof(T) % kStep == 0);
  T value;
  for (uint32_t i = 0; i < sizeof(T); i += kStep) {
    const char* from = reinterpret_cast<const char*>(p) + i;
    const uint64_t part = simulator::load_data(from, kStep, order::kPlain, at);
    std::memcpy(reinterpret_cast<char*>(&value) + i, &part, kStep);
  }
  return value;
}
template <typename T>
inline void store_plain(T* p, T v, FW_SITE) {
  constexpr uint32_t kStep = sizeof(T) < 8 ? sizeof(T) : 8;
  static_assert(sizeof(T) % kStep == 0);
  for (uint32_t i = 0; i < sizeof(T); i += kStep) {
    uint64_t part = 0;
    std::memcpy(&part, reinterpret_cast<const char*>(&v) + i, kStep);
    simulator::store_data(reinterpret_cast<char*>(p) + i, part, kStep, order::kPlain, at);
  }
}
inline void copy_plain(void* to, const void* from, uint64_t bytes, FW_SITE) {
  simulator::copy_data(to, from, bytes, at);
}
inline void fill_plain(void* to, uint8_t value, uint64_t bytes, FW_SITE) {
  simulator::fill_data(to, value, bytes, at);
}

template <uint32_t kBytes>
struct raw;
#define FW_DEFINE_RAW(BYTES, TYPE)                                                          \
  template <>                                                                               \
  struct raw<BYTES> {                                                                       \
    using type = TYPE;                                                                      \
    static TYPE load(const void* p, FW_SITE) {                                              \
      return TYPE(simulator::load_data(p, sizeof(TYPE), order::kRelaxed, at));              \
    }                                                                                       \
    static TYPE load_acquire_stream(const void* p, FW_SITE) { return load_acquire(p, at); } \
    static TYPE load_acquire(const void* p, FW_SITE) {                                      \
      return TYPE(simulator::load_data(p, sizeof(TYPE), order::kAcquire, at));              \
    }                                                                                       \
    static void store(void* p, TYPE v, FW_SITE) {                                           \
      simulator::store_data(p, v, sizeof(TYPE), order::kRelaxed, at);                       \
    }                                                                                       \
    static TYPE load_any(const void* p, FW_SITE) { return load(p, at); }                    \
    static void store_any(void* p, TYPE v, FW_SITE) { store(p, v, at); }                    \
    static TYPE load_plain(const void* p, FW_SITE) {                                        \
      return TYPE(simulator::load_data(p, sizeof(TYPE), order::kPlain, at));                \
    }                                                                                       \
    static void store_plain(void* p, TYPE v, FW_SITE) {                                     \
      simulator::store_data(p, v, sizeof(TYPE), order::kPlain, at);                         \
    }                                                                                       \
    static TYPE load_stream(const void* p, FW_SITE) {                                       \
      return TYPE(simulator::load_data(p, sizeof(TYPE), order::kPlain, at));                \
    }                                                                                       \
  };
FW_DEFINE_RAW(1, uint8_t)
FW_DEFINE_RAW(2, uint16_t)
FW_DEFINE_RAW(4, uint32_t)
FW_DEFINE_RAW(8, uint64_t)
#undef FW_DEFINE_RAW
template <>
struct raw<16> {
  using type = word16;
  static word16 load(const void* p, FW_SITE) { return load_halves(p, order::kRelaxed, at); }
  static word16 load_acquire(const void* p, FW_SITE) { return load_halves(p, order::kAcquire, at); }
  static word16 load_acquire_stream(const void* p, FW_SITE) { return load_acquire(p, at); }
  static void store(void* p, word16 v, FW_SITE) { store_halves(p, v, order::kRelaxed, at); }
  static word16 load_any(const void* p, FW_SITE) { return load(p, at); }
  static void store_any(void* p, word16 v, FW_SITE) { store(p, v, at); }
  static word16 load_plain(const void* p, FW_SITE) { return load_halves(p, order::kPlain, at); }
  static void store_plain(void* p, word16 v, FW_SITE) { store_halves(p, v, order::kPlain, at); }
  static word16 load_stream(const void* p, FW_SITE) { return load_halves(p, order::kPlain, at); }

 private:
  static word16 load_halves(const void* p, order o, simulator::site at) {
    const char* from = static_cast<const char*>(p);
    const uint64_t low = simulator::load_data(from, 8, o, at);
    const uint64_t high = simulator::load_data(from + 8, 8, o, at);
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
  }
  static void store_halves(void* p, word16 v, order o, simulator::site at) {
    char* to = static_cast<char*>(p);
    simulator::store_data(to, uint64_t(v.x) | (uint64_t(v.y) << 32), 8, o, at);
    simulator::store_data(to + 8, uint64_t(v.z) | (uint64_t(v.w) << 32), 8, o, at);
  }
};

}  // namespace fw::atomic
