// The differences between NVRTC and a host compiler: integer types, function markers, pause, clock.
//
// All other headers are the same text for the GPU, the CPU device and the simulator. On the GPU a
// warp has 32 lanes. On the CPU it has one, and a waiting thread serves the software controller
// (`thread_context::serve`) before it yields or sleeps. In the simulator (FW_SIMULATOR) a warp has
// FW_WARP_WIDTH lanes, and a seed decides which of them runs: see base/simulator/hooks.cuh.
#pragma once

#if defined(__CUDACC_RTC__)

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned long long uintptr_t;

#elif defined(__CUDACC__)

#include <cstddef>
#include <cstdint>

#else

// Of the standard library only what is small: each program for the CPU device includes this, and
// to read <thread>, <chrono> and <atomic> took the compiler a third of a second.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FW_ON_GPU 1
#define FW_DEVICE __device__ __forceinline__
#define FW_DEVICE_NOINLINE __device__ __noinline__
#define FW_DEVICE_C extern "C" __device__
#define FW_HOST_DEVICE __host__ __device__ __forceinline__
// Kernels run in blocks of at most 256 threads. FW_KERNEL_RESIDENT(n) lets n blocks fit on a
// multiprocessor: it limits registers to 65536 / 256 / n. The default is 64 registers, because
// kernels that wait for memory need many warps, and the miss path, which needs the most registers,
// runs seldom.
#define FW_KERNEL FW_KERNEL_RESIDENT(4)
#define FW_KERNEL_RESIDENT(n) FW_KERNEL_LINKAGE __global__ void __launch_bounds__(256, n)
// For blocks of up to 1024 threads, which share FW_SHARED memory and synchronise by block::sync().
#define FW_KERNEL_WIDE FW_KERNEL_LINKAGE __global__ void __launch_bounds__(1024, 1)
#define FW_GRID_CONSTANT __grid_constant__
// An uninitialised variable in a block's shared memory. On the CPU a block is one thread.
#define FW_SHARED __shared__
#define FW_UNROLL _Pragma("unroll")
// What the compiler may take for granted.
#define FW_ASSUME(condition) __builtin_assume(condition)
// Bytes that a thread loads together and keeps in registers. The warps of a multiprocessor need
// that much in flight to reach the bandwidth of its memory. Before sm_90, kernels of 64 registers
// would spill with 64 bytes.
#if __CUDA_ARCH__ >= 900
#define FW_BUNDLE_BYTES 64
#else
#define FW_BUNDLE_BYTES 32
#endif
#else
#define FW_ON_GPU 0
#define FW_DEVICE inline
#define FW_DEVICE_NOINLINE inline __attribute__((noinline))
#define FW_DEVICE_C extern "C" inline
#define FW_HOST_DEVICE inline
#define FW_KERNEL FW_KERNEL_LINKAGE void
#define FW_KERNEL_WIDE FW_KERNEL_LINKAGE void
#define FW_KERNEL_RESIDENT(n) FW_KERNEL_LINKAGE void
#define FW_GRID_CONSTANT
#define FW_SHARED static thread_local
#define FW_UNROLL
#define FW_ASSUME(condition) FW_ASSERT(condition)
#define FW_BUNDLE_BYTES 64
#endif

// In a program that a device compiles (FW_PROGRAM) a kernel's name is mangled, so that it contains
// the types of the parameters. On the CPU kernels are in a section of their own, by which they are
// found among the program's functions.
#if FW_ON_GPU && defined(FW_PROGRAM)
#define FW_KERNEL_LINKAGE
#elif FW_ON_GPU
#define FW_KERNEL_LINKAGE extern "C"
#elif defined(FW_PROGRAM)
#define FW_KERNEL_LINKAGE __attribute__((section("fw_kernels")))
#else
#define FW_KERNEL_LINKAGE inline
#endif

// Asserts a member's offset in a structure that host and device share. NVRTC has no offsetof, but
// the same layout rules as the host compiler, and it checks the sizes.
#if defined(__CUDACC_RTC__)
#define FW_CHECK_OFFSET(type, member, bytes) static_assert(sizeof(type) > (bytes))
#else
#define FW_CHECK_OFFSET(type, member, bytes) static_assert(offsetof(type, member) == (bytes))
#endif

// The replacement policy that device code is compiled with: one of those in cache/policy.cuh, or
// the user's own.
#if !defined(FW_POLICY)
#define FW_POLICY ::fw::cache::clock_policy
#endif
// Whether a cache has the words that a policy of the user's own may ask for.
#if !defined(FW_POLICY_WORDS)
#define FW_POLICY_WORDS 1
#endif

// Whether GPUs share the caches of this program: then operations have system scope.
#if defined(FW_SYSTEM_SCOPE)
#define FW_SCOPE "sys"
#else
#define FW_SYSTEM_SCOPE 0
#define FW_SCOPE "gpu"
#endif

// Whether kernels may take arrays of a client of a shared cache, which ask its owner for what is
// absent. On a GPU other kernels are compiled without it, so that they keep their registers.
#if !defined(FW_ASKS_OWNER)
#define FW_ASKS_OWNER !FW_ON_GPU
#endif

// ThreadSanitizer needs every racy access to be an atomic operation; see base/atomic.cuh.
#if defined(__SANITIZE_THREAD__)
#define FW_TSAN 1
#else
#define FW_TSAN 0
#endif

#if defined(FW_SIMULATOR)
#include "flashwarp/base/simulator/hooks.cuh"
// Code without lanes of its own, such as the controller's, is the same at every width.
#if !defined(FW_WARP_WIDTH)
#define FW_WARP_WIDTH 1
#endif
#else
// The line of a caller, which only the simulator wants to know.
#define FW_SITE [[maybe_unused]] ::fw::base::site at = {}
#endif

namespace fw::base {

inline constexpr bool kGpusShare = FW_SYSTEM_SCOPE != 0;
inline constexpr bool kAsksOwner = FW_ASKS_OWNER;

#if defined(FW_SIMULATOR)
using site = simulator::site;
#else
struct site {};
#endif

template <typename T>
struct without_const {
  using type = T;
  static constexpr bool kConst = false;
};
template <typename T>
struct without_const<const T> {
  using type = T;
  static constexpr bool kConst = true;
};

// One copy out of a namespace, of bytes that the host's memory may have now.
struct host_copy {
  uint64_t offset;  // in the namespace
  uint64_t target;
  uint64_t bytes;
  bool done;
  // So many times, from places that lie `stride` bytes apart, to the target back to back.
  uint64_t count = 1;
  uint64_t stride = 0;
};

// A namespace whose bytes threads of the CPU device may copy themselves. Both functions wait for
// nothing. Null: there is none.
struct host_source {
  // Makes the copies whose bytes are in memory now, and marks them as done. Of the others the
  // target is undefined.
  void (*copy)(void* source, host_copy* copies, uint32_t count) = nullptr;
  bool (*has)(void* source, uint64_t offset, uint64_t bytes) = nullptr;
  void* source = nullptr;
};

#if FW_ON_GPU

inline constexpr uint32_t kWarpWidth = 32;

// Nanoseconds of a clock that all threads of the device share. Ticks about once a microsecond.
FW_DEVICE uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Pauses the thread for about `ns` nanoseconds. Every wait loop calls it. Returns whether it has
// moved commands meanwhile, which only threads of the CPU device do.
FW_DEVICE bool pause(uint32_t ns) {
  __nanosleep(ns);
  return false;
}

// Hides the value of a pointer from the compiler. A call through a hidden pointer follows the
// calling convention, so the callee saves the registers that it uses. With a direct call to a
// function that needs more registers than the kernel has, the caller would keep the values of its
// hot loop in memory.
template <typename Function>
FW_DEVICE Function* opaque(Function* function) {
  asm volatile("" : "+l"(function));
  return function;
}

// Whether an address is on the thread's stack, which other threads cannot reach.
FW_DEVICE bool is_private(uint64_t address) { return __isLocal(reinterpret_cast<void*>(address)); }

// The threads for which an address is the same memory: 0 means all threads; otherwise a block's
// number plus one. The shared memory of each block has the same addresses.
FW_DEVICE uint32_t scope_of(uint64_t address) {
  return __isShared(reinterpret_cast<void*>(address)) ? blockIdx.x + 1 : 0;
}
// The scope of the calling thread's own block.
FW_DEVICE uint32_t own_scope() { return blockIdx.x + 1; }

// Ends the launch where FW_DEBUG is defined.
FW_DEVICE void trap_in_debug() {
#if defined(FW_DEBUG)
  __trap();
#endif
}

FW_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
FW_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
FW_DEVICE uint32_t popcount(uint32_t bits) { return __popc(bits); }
// Index of the lowest set bit; `bits` must not be zero.
FW_DEVICE uint32_t lowest_bit(uint32_t bits) { return __ffs(bits) - 1; }

FW_DEVICE uint32_t thread_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
FW_DEVICE uint32_t thread_count() { return gridDim.x * blockDim.x; }

// The multiprocessor's number, to spread work over queues and counters. It may differ at the next
// call, because a preempted warp can resume elsewhere. If the number must stay the same, one lane
// asks once for all.
FW_DEVICE uint32_t spread_index() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

// Only threads of the CPU device copy from host memory past the queue pairs.
FW_DEVICE host_source host_source_of(const void*) { return {}; }
FW_DEVICE void prefetch(const void*) {}
FW_DEVICE void wake(uint32_t*) {}
FW_DEVICE bool copy_at_once(void*, const void*, uint64_t) { return false; }
FW_DEVICE uint64_t* taken_of(uint32_t) { return nullptr; }

#else

inline bool is_private(uint64_t) { return false; }
// Never traps on the CPU, where it would end the process: the host raises the error.
inline void trap_in_debug() {}

inline uint64_t multiply_high(uint64_t a, uint64_t b) {
  return uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline uint32_t popcount(uint32_t bits) { return uint32_t(__builtin_popcount(bits)); }
inline uint32_t lowest_bit(uint32_t bits) { return uint32_t(__builtin_ctz(bits)); }

template <typename Function>
inline Function* opaque(Function* function) {
  return function;
}

#if defined(FW_SIMULATOR)

// Always inlined, because programs of several widths are linked together.
FW_DEVICE uint32_t own_scope() {
  return simulator::here->index / FW_WARP_WIDTH / simulator::here->block_warps + 1;
}
FW_DEVICE uint32_t scope_of(uint64_t address) {
  return simulator::is_of_block(reinterpret_cast<const void*>(address)) ? own_scope() : 0;
}

// Not `inline`, because files of one program may be compiled with different widths.
constexpr uint32_t kWarpWidth = FW_WARP_WIDTH;

inline uint64_t clock_ns() { return simulator::clock_ns(); }
inline bool pause(uint32_t ns) {
  simulator::pause(ns);
  return false;
}
inline void wake(uint32_t*) {}
inline uint32_t thread_index() { return simulator::here->index; }
inline uint32_t thread_count() { return simulator::here->count; }
inline uint32_t spread_index() { return simulator::spread_index(); }
inline host_source host_source_of(const void*) { return {}; }
inline void prefetch(const void*) {}
inline bool copy_at_once(void*, const void*, uint64_t) { return false; }
inline uint64_t* taken_of(uint32_t) { return nullptr; }

#else

// The threads of a process share all memory.
inline uint32_t scope_of(uint64_t) { return 0; }
inline uint32_t own_scope() { return 0; }

inline constexpr uint32_t kWarpWidth = 1;

// A thread's place in its launch on the CPU device, and its work while it waits.
struct thread_context {
  uint32_t index = 0;
  uint32_t count = 1;
  // Serves software controllers once; returns how many commands moved. Null outside a launch.
  int (*serve)(void*) = nullptr;
  void* serve_argument = nullptr;
  uint32_t yields = 0;  // in a row, since there was work
  // Finds the namespace of the queue pair with this SQ. Null outside a launch.
  host_source (*find)(void*, const void* sq) = nullptr;
  void* find_argument = nullptr;
  // Of each thread's part of the work, the items that were taken, 64 bytes apart. Null: threads
  // keep to their own parts.
  uint64_t* taken = nullptr;
};
inline thread_local thread_context this_thread;

// The namespace behind a queue pair, by the address of its SQ.
inline host_source host_source_of(const void* sq) {
  if (this_thread.find == nullptr) return {};
  return this_thread.find(this_thread.find_argument, sq);
}

// How many items of a thread's part of a launch were taken, an atomic; null: see `taken`.
inline uint64_t* taken_of(uint32_t part) {
  return this_thread.taken == nullptr ? nullptr : this_thread.taken + 8 * part;
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Copies a block in the widest accesses of the processor, if other threads may store to the source,
// or load from the target, meanwhile: the C library's accesses then take no aligned element of up
// to 8 bytes in parts. Returns false if the caller must copy by words, as for ThreadSanitizer.
//
// glibc before 2.40 copies large blocks by "rep movsb". On Zen 3 and 4 that takes four times as
// long if the target lies 16 bytes behind the source in their pages, as large arrays of numpy do
// behind frames.
inline bool copy_at_once(void* to, const void* from, uint64_t bytes) {
  if constexpr (FW_TSAN != 0) return false;
  const uint64_t target = reinterpret_cast<uint64_t>(to);
  const uint64_t behind = (target - reinterpret_cast<uint64_t>(from)) % 4096;
  if (bytes >= 2048 && behind == 16 && target % 16 == 0) return false;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  std::memcpy(to, from, bytes);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  return true;
}

inline uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

// How often a waiting thread yields before it sleeps: about as long as a drive's transfer takes.
// Threads that only yielded would starve the operating system's threads that finish the transfers:
// five of them on two cores did so for up to half a minute.
constexpr uint32_t kYieldsMax = 256;
constexpr timespec kSleep = {0, 20'000};  // 20 microseconds

// Serves the controllers. If they have no work, yields or sleeps.
inline bool pause(uint32_t) {
  if (this_thread.serve != nullptr && this_thread.serve(this_thread.serve_argument) > 0) {
    this_thread.yields = 0;
    return true;
  }
  if (this_thread.yields < kYieldsMax) {
    this_thread.yields++;
    sched_yield();
  } else {
    nanosleep(&kSleep, nullptr);
  }
  return false;
}

// Wakes the threads of all processes that sleep until a word in shared memory changes.
inline void wake(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7FFFFFFF, nullptr, nullptr, 0);
}

inline uint32_t thread_index() { return this_thread.index; }
inline uint32_t thread_count() { return this_thread.count; }
inline uint32_t spread_index() { return this_thread.index; }

#endif
#endif

}  // namespace fw::base
