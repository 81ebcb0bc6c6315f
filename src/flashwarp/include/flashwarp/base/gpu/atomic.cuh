// The atomic operations of GPUs, in PTX; base/atomic.cuh says what each of them means.
#pragma once

namespace fw::atomic {

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
  FW_DEFINE_LOAD(FW_DEVICE, load_relaxed, TYPE, const TYPE*,                                      \
                 "ld.relaxed." FW_SCOPE ".global.u" BITS, REG)                                    \
  FW_DEFINE_LOAD(FW_DEVICE, load_acquire, TYPE, const TYPE*,                                      \
                 "ld.acquire." FW_SCOPE ".global.u" BITS, REG)                                    \
  FW_DEFINE_STORE(FW_DEVICE, store_relaxed, TYPE, TYPE*, "st.relaxed." FW_SCOPE ".global.u" BITS, \
                  REG)                                                                            \
  FW_DEFINE_STORE(FW_DEVICE, store_release, TYPE, TYPE*, "st.release." FW_SCOPE ".global.u" BITS, \
                  REG)                                                                            \
  FW_DEFINE_STORE(FW_DEVICE, store_relaxed_system, TYPE, TYPE*, "st.relaxed.sys.global.u" BITS,   \
                  REG)                                                                            \
  FW_DEFINE_ADD(add_relaxed, TYPE, "atom.relaxed." FW_SCOPE ".global.add.u" BITS, REG)            \
  FW_DEFINE_ADD(add_acquire, TYPE, "atom.acquire." FW_SCOPE ".global.add.u" BITS, REG)            \
  FW_DEFINE_ADD(add_release, TYPE, "atom.release." FW_SCOPE ".global.add.u" BITS, REG)            \
  FW_DEVICE bool cas_acq_rel(TYPE* p, TYPE expected, TYPE desired) {                              \
    TYPE old;                                                                                     \
    asm volatile("atom.acq_rel." FW_SCOPE ".global.cas.b" BITS " %0, [%1], %2, %3;"               \
                 : "=" REG(old)                                                                   \
                 : "l"(p), REG(expected), REG(desired)                                            \
                 : "memory");                                                                     \
    return old == expected;                                                                       \
  }
FW_DEFINE_ATOMICS(uint32_t, "32", "r")
FW_DEFINE_ATOMICS(uint64_t, "64", "l")
#undef FW_DEFINE_ATOMICS
FW_DEFINE_ADD(or_acquire, uint32_t, "atom.acquire." FW_SCOPE ".global.or.b32", "r")
FW_DEFINE_ADD(or_relaxed, uint32_t, "atom.relaxed." FW_SCOPE ".global.or.b32", "r")
FW_DEFINE_ADD(add_relaxed, float, "atom.relaxed." FW_SCOPE ".global.add.f32", "f")
FW_DEFINE_ADD(add_relaxed, double, "atom.relaxed." FW_SCOPE ".global.add.f64", "d")
#undef FW_DEFINE_ADD
FW_DEFINE_LOAD(FW_DEVICE, load_relaxed_system, uint32_t, const uint32_t*,
               "ld.relaxed.sys.global.u32", "r")
FW_DEFINE_LOAD(FW_DEVICE, load_relaxed_system, uint64_t, const uint64_t*,
               "ld.relaxed.sys.global.u64", "l")
FW_DEVICE pair64 load_relaxed_pair(const uint64_t* p) {
  pair64 v;
  asm volatile("ld.relaxed." FW_SCOPE ".global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(p)
               : "memory");
  return v;
}
FW_DEVICE pair64 load_acquire_pair(const uint64_t* p) {
  pair64 v;
  asm volatile("ld.acquire." FW_SCOPE ".global.v2.u64 {%0, %1}, [%2];"
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
  asm volatile("red.relaxed." FW_SCOPE ".global.or.b64 [%0], %1;" ::"l"(p), "l"(bits) : "memory");
}
FW_DEVICE void and_relaxed(uint64_t* p, uint64_t bits) {
  asm volatile("red.relaxed." FW_SCOPE ".global.and.b64 [%0], %1;" ::"l"(p), "l"(bits) : "memory");
}
// A compare-and-swap that a fence(), or a lock, orders.
FW_DEVICE bool cas_relaxed(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.relaxed." FW_SCOPE ".global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old == expected;
}

// Acquire-release fence for all threads of the device.
FW_DEVICE void fence() { asm volatile("fence.acq_rel." FW_SCOPE ";" ::: "memory"); }
// The acquiring half of fence(): the thread's relaxed loads come before all that follows. A GPU
// that has it does not wait for the thread's stores.
FW_DEVICE void fence_acquire() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("fence.acquire." FW_SCOPE ";" ::: "memory");
#else
  fence();
#endif
}
// As fence(), and orders stores before later loads too, as Dekker's pattern needs.
FW_DEVICE void fence_sequential() { asm volatile("fence.sc." FW_SCOPE ";" ::: "memory"); }
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
#define FW_DEFINE_RAW(BYTES, TYPE, MEMORY, PTX, REG)                                               \
  template <>                                                                                      \
  struct raw<BYTES> {                                                                              \
    using type = TYPE;                                                                             \
    FW_DEFINE_LOAD(FW_DEVICE static, load, TYPE, const void*,                                      \
                   "ld.relaxed." FW_SCOPE ".global." PTX, REG)                                     \
    FW_DEFINE_LOAD(FW_DEVICE static, load_acquire, TYPE, const void*,                              \
                   "ld.acquire." FW_SCOPE ".global." PTX, REG)                                     \
    FW_DEFINE_LOAD(FW_DEVICE static, load_any, TYPE, const void*, "ld.relaxed." FW_SCOPE "." PTX,  \
                   REG)                                                                            \
    FW_DEFINE_LOAD(FW_DEVICE static, load_stream, TYPE, const void*, "ld.global.cs." PTX, REG)     \
    FW_DEFINE_STORE(FW_DEVICE static, store, TYPE, void*, "st.relaxed." FW_SCOPE ".global." PTX,   \
                    REG)                                                                           \
    FW_DEFINE_STORE(FW_DEVICE static, store_any, TYPE, void*, "st.relaxed." FW_SCOPE "." PTX, REG) \
    FW_DEVICE static TYPE load_plain(const void* p) { return *static_cast<const MEMORY*>(p); }     \
    FW_DEVICE static void store_plain(void* p, TYPE v) { *static_cast<MEMORY*>(p) = MEMORY(v); }   \
    FW_DEVICE static TYPE load_acquire_stream(const void* p) {                                     \
      if constexpr (!kHasEvictFirst) {                                                             \
        return load_acquire(p);                                                                    \
      } else {                                                                                     \
        TYPE v;                                                                                    \
        asm volatile("ld.acquire." FW_SCOPE ".global.L2::cache_hint." PTX " %0, [%1], %2;"         \
                     : "=" REG(v)                                                                  \
                     : "l"(p), "l"(evict_first())                                                  \
                     : "memory");                                                                  \
        return v;                                                                                  \
      }                                                                                            \
    }                                                                                              \
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
  FW_DEFINE_LOAD(load, "ld.relaxed." FW_SCOPE ".global")
  FW_DEFINE_LOAD(load_acquire, "ld.acquire." FW_SCOPE ".global")
  FW_DEFINE_LOAD(load_any, "ld.relaxed." FW_SCOPE)
  FW_DEFINE_LOAD(load_stream, "ld.global.cs")
  FW_DEFINE_STORE(store, "st.relaxed." FW_SCOPE ".global")
  FW_DEFINE_STORE(store_any, "st.relaxed." FW_SCOPE)
  FW_DEVICE static word16 load_plain(const void* p) { return *static_cast<const word16*>(p); }
  FW_DEVICE static void store_plain(void* p, word16 v) { *static_cast<word16*>(p) = v; }
  FW_DEVICE static word16 load_acquire_stream(const void* p) {
    if constexpr (!kHasEvictFirst) {
      return load_acquire(p);
    } else {
      word16 v;
      asm volatile("ld.acquire." FW_SCOPE
                   ".global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(p), "l"(evict_first())
                   : "memory");
      return v;
    }
  }
};
#undef FW_DEFINE_LOAD
#undef FW_DEFINE_STORE

}  // namespace fw::atomic
