// Atomic loads, stores, read-modify-writes and fences, named by order and scope.
//
// The only file that spells memory orders: inline PTX for the GPU, compiler builtins for the CPU;
// base/simulator/atomic.cuh has the simulator's version. The scope is the device (`.gpu`); with the
// suffix `_system` it includes the host and its controller. The types are 32-bit and 64-bit
// unsigned integers, and `word16` where the name says 16.
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

#if FW_ON_GPU

// Each defines one function: its markers, name and types, its PTX instruction and register.
#define FW_DEFINE_LOAD(MARKS, NAME, TYPE, POINTER, PTX, REG)         \
  MARKS TYPE NAME(POINTER p) {                                       \
    TYPE v;                                                          \
    asm volatile(PTX " %0, [%1];" : "=" REG(v) : "l"(p) : "memory"); \
    return v;                                                        \
  }
#define FW_DEFINE_STORE(MARKS, NAME, TYPE, POINTER, PTX, REG) \
  MARKS void NAME(POINTER p, TYPE v) { asm volatile(PTX " [%0], %1;" ::"l"(p), REG(v) : "memory"); }
#define FW_DEFINE_ADD(NAME, TYPE, PTX, REG)                                        \
  FW_DEVICE TYPE NAME(TYPE* p, TYPE v) {                                           \
    TYPE old;                                                                      \
    asm volatile(PTX " %0, [%1], %2;" : "=" REG(old) : "l"(p), REG(v) : "memory"); \
    return old;                                                                    \
  }

#define FW_DEFINE_ATOMICS(TYPE, BITS, REG)                                                        \
  FW_DEFINE_LOAD(FW_DEVICE, load_relaxed, TYPE, const TYPE*, "ld.relaxed.gpu.global.u" BITS, REG) \
  FW_DEFINE_LOAD(FW_DEVICE, load_acquire, TYPE, const TYPE*, "ld.acquire.gpu.global.u" BITS, REG) \
  FW_DEFINE_STORE(FW_DEVICE, store_relaxed, TYPE, TYPE*, "st.relaxed.gpu.global.u" BITS, REG)     \
  FW_DEFINE_STORE(FW_DEVICE, store_release, TYPE, TYPE*, "st.release.gpu.global.u" BITS, REG)     \
  FW_DEFINE_STORE(FW_DEVICE, store_relaxed_system, TYPE, TYPE*, "st.relaxed.sys.global.u" BITS,   \
                  REG)                                                                            \
  FW_DEFINE_ADD(add_relaxed, TYPE, "atom.relaxed.gpu.global.add.u" BITS, REG)                     \
  FW_DEFINE_ADD(add_acquire, TYPE, "atom.acquire.gpu.global.add.u" BITS, REG)                     \
  FW_DEFINE_ADD(add_release, TYPE, "atom.release.gpu.global.add.u" BITS, REG)                     \
  FW_DEVICE bool cas_acq_rel(TYPE* p, TYPE expected, TYPE desired) {                              \
    TYPE old;                                                                                     \
    asm volatile("atom.acq_rel.gpu.global.cas.b" BITS " %0, [%1], %2, %3;"                        \
                 : "=" REG(old)                                                                   \
                 : "l"(p), REG(expected), REG(desired)                                            \
                 : "memory");                                                                     \
    return old == expected;                                                                       \
  }
FW_DEFINE_ATOMICS(uint32_t, "32", "r")
FW_DEFINE_ATOMICS(uint64_t, "64", "l")
#undef FW_DEFINE_ATOMICS
FW_DEFINE_ADD(or_acquire, uint32_t, "atom.acquire.gpu.global.or.b32", "r")
FW_DEFINE_ADD(or_relaxed, uint32_t, "atom.relaxed.gpu.global.or.b32", "r")
FW_DEFINE_ADD(add_relaxed, float, "atom.relaxed.gpu.global.add.f32", "f")
FW_DEFINE_ADD(add_relaxed, double, "atom.relaxed.gpu.global.add.f64", "d")
#undef FW_DEFINE_ADD
FW_DEFINE_LOAD(FW_DEVICE, load_relaxed_system, uint32_t, const uint32_t*,
               "ld.relaxed.sys.global.u32", "r")
FW_DEFINE_LOAD(FW_DEVICE, load_relaxed_system, uint64_t, const uint64_t*,
               "ld.relaxed.sys.global.u64", "l")
FW_DEVICE pair64 load_relaxed_pair(const uint64_t* p) {
  pair64 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(p)
               : "memory");
  return v;
}
FW_DEVICE pair64 load_acquire_pair(const uint64_t* p) {
  pair64 v;
  asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(p)
               : "memory");
  return v;
}
// Each half is loaded atomically, as its writer stores it: PTX treats the elements of a vector load
// as separate accesses.
FW_DEVICE word16 load16_relaxed_system(const word16* p) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}
// A store to a device's register: performed once and never merged with another (PTX ISA 8.2). For
// memory it would only be slower.
FW_DEFINE_STORE(FW_DEVICE, store_mmio, uint32_t, uint32_t*, "st.mmio.relaxed.sys.global.u32", "r")
FW_DEVICE void or_relaxed(uint64_t* p, uint64_t bits) {
  asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(p), "l"(bits) : "memory");
}
FW_DEVICE void and_relaxed(uint64_t* p, uint64_t bits) {
  asm volatile("red.relaxed.gpu.global.and.b64 [%0], %1;" ::"l"(p), "l"(bits) : "memory");
}
// A compare-and-swap that a fence(), or a lock, orders.
FW_DEVICE bool cas_relaxed(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old == expected;
}

// Acquire-release fence for all threads of the device.
FW_DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// The acquiring half of fence(): the thread's relaxed loads come before all that follows. A GPU
// that has it does not wait for the thread's stores.
FW_DEVICE void fence_acquire() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  fence();
#endif
}
// As fence(), and orders stores before later loads too, as Dekker's pattern needs.
FW_DEVICE void fence_sequential() { asm volatile("fence.sc.gpu;" ::: "memory"); }
// As fence(), for the host and its controller too.
FW_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
FW_DEVICE void fence_sequential_system() { asm volatile("fence.sc.sys;" ::: "memory"); }

// Accesses that a lock, or a later release, orders. They have names so that the simulator can check
// that.
template <typename T>
FW_DEVICE T load_plain(const T* p) {
  return *p;
}
template <typename T>
FW_DEVICE void store_plain(T* p, T v) {
  *p = v;
}

// A hint that the L2 cache may evict what is loaded first. Turing does not have it.
inline constexpr bool kHasEvictFirst = __CUDA_ARCH__ >= 800;
FW_DEVICE uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Accesses to frames by the width of an element. They are relaxed atomics, because another warp may
// refill the frame meanwhile; the tag's generation decides whether the value counts. `_plain` is
// for memory of any kind that no other thread uses meanwhile. `_any` is relaxed, for buffers in
// global or shared memory that threads share. `load_stream` and `load_acquire_stream` let the L2
// cache evict the memory first.
template <uint32_t kBytes>
struct raw;
#define FW_DEFINE_RAW(BYTES, TYPE, MEMORY, PTX, REG)                                             \
  template <>                                                                                    \
  struct raw<BYTES> {                                                                            \
    using type = TYPE;                                                                           \
    FW_DEFINE_LOAD(FW_DEVICE static, load, TYPE, const void*, "ld.relaxed.gpu.global." PTX, REG) \
    FW_DEFINE_LOAD(FW_DEVICE static, load_acquire, TYPE, const void*,                            \
                   "ld.acquire.gpu.global." PTX, REG)                                            \
    FW_DEFINE_LOAD(FW_DEVICE static, load_any, TYPE, const void*, "ld.relaxed.gpu." PTX, REG)    \
    FW_DEFINE_LOAD(FW_DEVICE static, load_stream, TYPE, const void*, "ld.global.cs." PTX, REG)   \
    FW_DEFINE_STORE(FW_DEVICE static, store, TYPE, void*, "st.relaxed.gpu.global." PTX, REG)     \
    FW_DEFINE_STORE(FW_DEVICE static, store_any, TYPE, void*, "st.relaxed.gpu." PTX, REG)        \
    FW_DEVICE static TYPE load_plain(const void* p) { return *static_cast<const MEMORY*>(p); }   \
    FW_DEVICE static void store_plain(void* p, TYPE v) { *static_cast<MEMORY*>(p) = MEMORY(v); } \
    FW_DEVICE static TYPE load_acquire_stream(const void* p) {                                   \
      if constexpr (!kHasEvictFirst) {                                                           \
        return load_acquire(p);                                                                  \
      } else {                                                                                   \
        TYPE v;                                                                                  \
        asm volatile("ld.acquire.gpu.global.L2::cache_hint." PTX " %0, [%1], %2;"                \
                     : "=" REG(v)                                                                \
                     : "l"(p), "l"(evict_first())                                                \
                     : "memory");                                                                \
        return v;                                                                                \
      }                                                                                          \
    }                                                                                            \
  };
FW_DEFINE_RAW(1, uint16_t, uint8_t, "u8", "h")
FW_DEFINE_RAW(2, uint16_t, uint16_t, "u16", "h")
FW_DEFINE_RAW(4, uint32_t, uint32_t, "u32", "r")
FW_DEFINE_RAW(8, uint64_t, uint64_t, "u64", "l")
#undef FW_DEFINE_RAW
#undef FW_DEFINE_LOAD
#undef FW_DEFINE_STORE

#define FW_DEFINE_LOAD(NAME, PTX)                             \
  FW_DEVICE static word16 NAME(const void* p) {               \
    word16 v;                                                 \
    asm volatile(PTX ".v4.u32 {%0, %1, %2, %3}, [%4];"        \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) \
                 : "l"(p)                                     \
                 : "memory");                                 \
    return v;                                                 \
  }
#define FW_DEFINE_STORE(NAME, PTX)                                                             \
  FW_DEVICE static void NAME(void* p, word16 v) {                                              \
    asm volatile(PTX ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), \
                 "r"(v.w)                                                                      \
                 : "memory");                                                                  \
  }
template <>
struct raw<16> {
  using type = word16;
  FW_DEFINE_LOAD(load, "ld.relaxed.gpu.global")
  FW_DEFINE_LOAD(load_acquire, "ld.acquire.gpu.global")
  FW_DEFINE_LOAD(load_any, "ld.relaxed.gpu")
  FW_DEFINE_LOAD(load_stream, "ld.global.cs")
  FW_DEFINE_STORE(store, "st.relaxed.gpu.global")
  FW_DEFINE_STORE(store_any, "st.relaxed.gpu")
  FW_DEVICE static word16 load_plain(const void* p) { return *static_cast<const word16*>(p); }
  FW_DEVICE static void store_plain(void* p, word16 v) { *static_cast<word16*>(p) = v; }
  FW_DEVICE static word16 load_acquire_stream(const void* p) {
    if constexpr (!kHasEvictFirst) {
      return load_acquire(p);
    } else {
      word16 v;
      asm volatile("ld.acquire.gpu.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(p), "l"(evict_first())
                   : "memory");
      return v;
    }
  }
};
#undef FW_DEFINE_LOAD
#undef FW_DEFINE_STORE

#elif !defined(FW_SIMULATOR)

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

#endif

}  // namespace fw::atomic

#if defined(FW_SIMULATOR)
#include "flashwarp/base/simulator/atomic.cuh"
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
