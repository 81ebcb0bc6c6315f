// Copies of global or host memory by few lanes of a warp, through shared memory.
//
// A lane has a few loads in flight, so that alone it takes 44 us for 4 KiB of host memory. The
// multiprocessor's copy engine (cp.async.bulk, from sm_90 on) fetches them at once. It could store
// to the frame as well; but it works through another proxy, whose stores a reader's second look at
// the tag does not order. So the lanes store what it has fetched.
//
// The buffer is static shared memory of each kernel that may miss, kStagingBytes of it. A lock for
// each block, in device memory, says who uses it: shared memory begins with unknown values. Kernels
// whose warps are always whole define FW_WHOLE_WARPS and have no buffer.
#pragma once

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"

namespace fw::warp {

// How many accesses each lane keeps in flight.
inline constexpr uint32_t kCopyUnroll = 8;

#if !defined(FW_WHOLE_WARPS)
#define FW_WHOLE_WARPS 0
#endif

#if FW_ON_GPU && __CUDA_ARCH__ >= 900 && !FW_WHOLE_WARPS

// More lanes copy as fast without the buffer.
inline constexpr uint32_t kStagingLanes = 8;
// While the lanes store one piece, the others are on their way.
inline constexpr uint32_t kPieceBytes = 512;
inline constexpr uint32_t kPieces = 4;
// How often a warp tries to get the buffer before it copies without.
inline constexpr uint32_t kStagingTries = 32;
inline constexpr uint32_t kStagingLocks = 1024;

namespace staging {

static __device__ uint32_t staging_locks[kStagingLocks];

FW_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

FW_DEVICE void init_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
FW_DEVICE void end_barrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Orders what was done to the buffer before what the copy engine does next.
FW_DEVICE void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Starts to fetch `bytes`, a multiple of 16. `barrier` ends its phase when they are there.
FW_DEVICE void fetch_piece(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
FW_DEVICE void wait_for_phase(uint32_t barrier, uint32_t parity) {
  uint32_t over = 0;
  while (over == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}
FW_DEVICE atomic::word16 load_shared(uint32_t from) {
  atomic::word16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// Stores one piece to the frame, by all lanes of the mask.
FW_DEVICE void store_piece(uint32_t mask, char* to, uint32_t from, uint32_t bytes) {
  using word = atomic::raw<16>;
  const uint32_t step = base::popcount(mask) * 16;
  const uint32_t first = rank_in(mask) * 16;
  for (uint32_t round = 0; round < bytes; round += step * kCopyUnroll) {
    atomic::word16 values[kCopyUnroll];
    const uint32_t at = round + first;
    // What lies behind the piece is loaded, and not stored.
    FW_UNROLL
    for (uint32_t u = 0; u < kCopyUnroll; u++) {
      values[u] = load_shared(from + ((at + u * step) & (kPieceBytes - 1)));
    }
    FW_UNROLL
    for (uint32_t u = 0; u < kCopyUnroll; u++) {
      if (at + u * step < bytes) word::store(to + at + u * step, values[u]);
    }
  }
}

}  // namespace staging

// Whether `copy_staged` can copy this, and is the faster way.
FW_DEVICE bool is_staged(uint32_t mask, uint64_t target, uint64_t origin, uint64_t bytes) {
  return base::popcount(mask) <= kStagingLanes && (target | origin | bytes) % 16 == 0 &&
         bytes >= 256;
}

// Copies `bytes` from global memory to a frame, by few lanes. Returns false, and copies nothing, if
// the block's buffer did not come free.
FW_DEVICE_NOINLINE bool copy_staged(uint32_t mask, uint64_t target, uint64_t origin,
                                    uint64_t bytes) {
  __shared__ alignas(128) char buffer[kPieces * kPieceBytes];
  __shared__ alignas(8) uint64_t arrivals[kPieces];
  const uint32_t leader = base::lowest_bit(mask);
  const bool leads = lane() == leader;
  uint32_t* lock = &staging::staging_locks[blockIdx.x % kStagingLocks];
  bool got = false;
  if (leads) {
    for (uint32_t k = 0; k < kStagingTries && !got; k++) {
      if (k != 0) base::pause(200);
      // Acquire: the last user's loads from the buffer are over.
      got = atomic::cas_acq_rel(lock, uint32_t(0), uint32_t(1));
    }
  }
  if (!broadcast(mask, got, leader)) return false;
  const uint32_t from = staging::shared_address(buffer);
  const uint32_t barriers = staging::shared_address(arrivals);
  const uint32_t end = uint32_t(bytes);
  const auto fetch = [&](uint32_t begin) {
    const uint32_t place = begin / kPieceBytes % kPieces;
    const uint32_t rest = end - begin;
    staging::fetch_piece(from + place * kPieceBytes, origin + begin,
                         rest < kPieceBytes ? rest : kPieceBytes, barriers + place * 8);
  };
  if (leads) {
    for (uint32_t place = 0; place < kPieces; place++) staging::init_barrier(barriers + place * 8);
    staging::fence_proxies();
    for (uint32_t at = 0; at < end && at < kPieces * kPieceBytes; at += kPieceBytes) fetch(at);
  }
  // The barriers are there before any lane waits at them.
  sync(mask);
  char* const to = reinterpret_cast<char*>(target);
  for (uint32_t at = 0; at < end; at += kPieceBytes) {
    const uint32_t number = at / kPieceBytes;
    const uint32_t place = number % kPieces;
    staging::wait_for_phase(barriers + place * 8, number / kPieces & 1);
    const uint32_t rest = end - at;
    staging::store_piece(mask, to + at, from + place * kPieceBytes,
                         rest < kPieceBytes ? rest : kPieceBytes);
    // All lanes have loaded the piece before another takes its place.
    sync(mask);
    const uint32_t next = at + kPieces * kPieceBytes;
    if (leads && next < end) {
      staging::fence_proxies();
      fetch(next);
    }
  }
  if (leads) {
    for (uint32_t place = 0; place < kPieces; place++) staging::end_barrier(barriers + place * 8);
    // Release: our loads from the buffer are over.
    atomic::store_release(lock, uint32_t(0));
  }
  return true;
}

#else

FW_DEVICE constexpr bool is_staged(uint32_t, uint64_t, uint64_t, uint64_t) { return false; }
FW_DEVICE constexpr bool copy_staged(uint32_t, uint64_t, uint64_t, uint64_t) { return false; }

#endif

}  // namespace fw::warp
