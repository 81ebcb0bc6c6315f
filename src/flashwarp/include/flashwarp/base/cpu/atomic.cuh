// The atomic operations of the CPU device, in compiler builtins; base/atomic.cuh says what each of
// them means.
#pragma once

namespace fw::atomic {

template <typename T>
inline T load_relaxed(const T* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <typename T>
inline T load_acquire(const T* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <typename T>
inline void store_relaxed(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
template <typename T>
inline void store_release(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
// Release, because ThreadSanitizer has no model of the fence that precedes a doorbell.
template <typename T>
inline void store_relaxed_system(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
template <typename T>
inline T add_relaxed(T* p, T v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
template <typename T>
inline T add_acquire(T* p, T v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQUIRE);
}
template <typename T>
inline T add_release(T* p, T v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
template <typename T>
inline bool cas_acq_rel(T* p, T expected, T desired) {
  return __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE);
}
// Acquire and release, because ThreadSanitizer has no model of the fence that orders it.
inline bool cas_relaxed(uint64_t* p, uint64_t expected, uint64_t desired) {
  return cas_acq_rel(p, expected, desired);
}
inline uint32_t or_acquire(uint32_t* p, uint32_t bits) {
  return __atomic_fetch_or(p, bits, __ATOMIC_ACQUIRE);
}
// As cas_relaxed.
inline uint32_t or_relaxed(uint32_t* p, uint32_t bits) { return or_acquire(p, bits); }
inline pair64 load_relaxed_pair(const uint64_t* p) {
  return {load_relaxed(p), load_relaxed(p + 1)};
}
inline pair64 load_acquire_pair(const uint64_t* p) {
  return {load_acquire(p), load_acquire(p + 1)};
}
template <typename T>
inline T load_relaxed_system(const T* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// Acquires the second half, which the controller stores last, with release.
inline word16 load16_relaxed_system(const word16* p) {
  const uint64_t* q = reinterpret_cast<const uint64_t*>(p);
  uint64_t high = load_acquire(q + 1);
  uint64_t low = load_relaxed(q);
  return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}
inline void store_mmio(uint32_t* p, uint32_t v) { store_relaxed_system(p, v); }
inline void or_relaxed(uint64_t* p, uint64_t bits) { __atomic_fetch_or(p, bits, __ATOMIC_RELAXED); }
inline void and_relaxed(uint64_t* p, uint64_t bits) {
  __atomic_fetch_and(p, bits, __ATOMIC_RELAXED);
}
template <typename T>
inline T load_plain(const T* p) {
  return *p;
}
template <typename T>
inline void store_plain(T* p, T v) {
  *p = v;
}
// Copies by the software controller. Host code only.
inline void copy_plain(void* to, const void* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
inline void fill_plain(void* to, uint8_t value, uint64_t bytes) { std::memset(to, value, bytes); }

#if FW_TSAN
// ThreadSanitizer has no model of fences; every datum they order is itself atomic in that build.
inline void fence() {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  asm volatile("mfence" ::: "memory");
}
inline void fence_acquire() { fence(); }
inline void fence_sequential() { fence(); }
inline void fence_system() { fence(); }
inline void fence_sequential_system() { fence(); }
#else
inline void fence() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline void fence_acquire() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
inline void fence_sequential() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// Towards drives, too, which read and write memory as devices. x86 keeps the order of stores to
// memory and to registers by itself. Arm needs the barrier of the outer shareable domain.
inline void fence_system() {
#if defined(__aarch64__)
  asm volatile("dmb osh" ::: "memory");
#else
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}
inline void fence_sequential_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

template <uint32_t kBytes>
struct raw;
#define FW_DEFINE_RAW(BYTES, TYPE)                                             \
  template <>                                                                  \
  struct raw<BYTES> {                                                          \
    using type = TYPE;                                                         \
    static TYPE load(const void* p) {                                          \
      return __atomic_load_n(static_cast<const TYPE*>(p), __ATOMIC_RELAXED);   \
    }                                                                          \
    static TYPE load_acquire(const void* p) {                                  \
      return __atomic_load_n(static_cast<const TYPE*>(p), __ATOMIC_ACQUIRE);   \
    }                                                                          \
    static TYPE load_acquire_stream(const void* p) { return load_acquire(p); } \
    static void store(void* p, TYPE v) {                                       \
      __atomic_store_n(static_cast<TYPE*>(p), v, __ATOMIC_RELAXED);            \
    }                                                                          \
    static TYPE load_any(const void* p) { return load(p); }                    \
    static void store_any(void* p, TYPE v) { store(p, v); }                    \
    static TYPE load_plain(const void* p) { return load(p); }                  \
    static void store_plain(void* p, TYPE v) { store(p, v); }                  \
    static TYPE load_stream(const void* p) { return load(p); }                 \
  };
FW_DEFINE_RAW(1, uint8_t)
FW_DEFINE_RAW(2, uint16_t)
FW_DEFINE_RAW(4, uint32_t)
FW_DEFINE_RAW(8, uint64_t)
#undef FW_DEFINE_RAW
template <>
struct raw<16> {
  using type = word16;
#if FW_TSAN
  static word16 load(const void* p) {
    const uint64_t* q = static_cast<const uint64_t*>(p);
    uint64_t low = load_relaxed(q), high = load_relaxed(q + 1);
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
  }
  static word16 load_acquire(const void* p) {
    const uint64_t* q = static_cast<const uint64_t*>(p);
    uint64_t low = fw::atomic::load_acquire(q), high = fw::atomic::load_acquire(q + 1);
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
  }
  static void store(void* p, word16 v) {
    uint64_t* q = static_cast<uint64_t*>(p);
    store_relaxed(q, uint64_t(v.x) | (uint64_t(v.y) << 32));
    store_relaxed(q + 1, uint64_t(v.z) | (uint64_t(v.w) << 32));
  }
#else
  // A 16-byte volatile access is one SSE or NEON move: what relaxed order means on these hosts.
  typedef uint32_t vector __attribute__((vector_size(16)));
  static word16 load(const void* p) {
    vector v = *static_cast<const volatile vector*>(p);
    return {v[0], v[1], v[2], v[3]};
  }
  static word16 load_acquire(const void* p) {
    const word16 value = load(p);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return value;
  }
  static void store(void* p, word16 v) {
    *static_cast<volatile vector*>(p) = vector{v.x, v.y, v.z, v.w};
  }
#endif
  static word16 load_acquire_stream(const void* p) { return load_acquire(p); }
  static word16 load_any(const void* p) { return load(p); }
  static void store_any(void* p, word16 v) { store(p, v); }
  static word16 load_plain(const void* p) { return load(p); }
  static void store_plain(void* p, word16 v) { store(p, v); }
  static word16 load_stream(const void* p) { return load(p); }
};

}  // namespace fw::atomic
