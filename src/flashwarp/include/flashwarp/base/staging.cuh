// Copies of global or host memory through shared memory, by the copy engine.
//
// A lane has a few loads in flight, so that alone it takes 44 us for 4 KiB of host memory. A whole
// warp has enough, but they need registers, and a fence waits for them. The
// multiprocessor's copy engine (cp.async.bulk, from sm_90 on) fetches them at once. It could store
// to the frame as well; but it works through another proxy, whose stores a reader's second look at
// the tag does not order. So the lanes store what it has fetched.
//
// The buffer is static shared memory of each kernel that may miss, 4,224 bytes of it. A lock for
// each block, in device memory, says who uses it: shared memory begins with unknown values. Kernels
// whose warps are always whole define FW_WHOLE_WARPS and have no buffer.
#pragma once

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"

namespace fw::warp {

// How many accesses each lane keeps in flight.
inline constexpr uint32_t kCopyUnroll = 8;

#if FW_ON_GPU && __CUDA_ARCH__ >= 900 && !FW_WHOLE_WARPS

inline constexpr bool kHasStaging = true;
// More lanes copy as fast without the buffer.
inline constexpr uint32_t kStagingLanes = 8;
// A line of 4 KiB is on its way whole. Few pieces, because the leader takes longer to ask for one
// than the link takes to bring it; two, so that one is on its way while the lanes store the other.
inline constexpr uint32_t kPieceBytes = 2048;
inline constexpr uint32_t kPieces = 2;
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
// Orders what lanes did to the buffer before what the copy engine does next. It does not wait for
// the stores to the frame.
FW_DEVICE void fence_buffer() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for the memory that it reads, which lanes of other warps may have written back.
FW_DEVICE void fence_source() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
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

// Stores part of a piece to the frame, by one lane. Loads four words ahead of those that it stores.
inline constexpr uint32_t kPartBytes = 512;
FW_DEVICE void store_part_alone(char* to, uint32_t from) {
  using word = atomic::raw<16>;
  constexpr uint32_t kAhead = 4;
  constexpr uint32_t kWords = kPartBytes / 16;
  atomic::word16 values[2][kAhead];
  FW_UNROLL
  for (uint32_t u = 0; u < kAhead; u++) values[0][u] = load_shared(from + u * 16);
  FW_UNROLL
  for (uint32_t w = 0; w < kWords; w += kAhead) {
    const uint32_t half = w / kAhead & 1;
    FW_UNROLL
    for (uint32_t u = 0; u < kAhead; u++) {
      const uint32_t next = w + kAhead + u;
      if (next < kWords) values[half ^ 1][u] = load_shared(from + next * 16);
    }
    FW_UNROLL
    for (uint32_t u = 0; u < kAhead; u++) word::store(to + (w + u) * 16, values[half][u]);
  }
}

// Stores a whole piece to the frame, by all lanes of a warp.
FW_DEVICE void store_piece_together(char* to, uint32_t from) {
  using word = atomic::raw<16>;
  constexpr uint32_t kStep = kWarpWidth * 16;
  constexpr uint32_t kWords = kPieceBytes / kStep;
  const uint32_t mine = lane() * 16;
  atomic::word16 values[kWords];
  FW_UNROLL
  for (uint32_t u = 0; u < kWords; u++) values[u] = load_shared(from + mine + u * kStep);
  FW_UNROLL
  for (uint32_t u = 0; u < kWords; u++) word::store(to + mine + u * kStep, values[u]);
}

// Stores one piece to the frame, by all lanes of `here`.
FW_DEVICE void store_piece(lanes here, char* to, uint32_t from, uint32_t bytes) {
  using word = atomic::raw<16>;
  if (here == lanes::all() && bytes == kPieceBytes) return store_piece_together(to, from);
  const uint32_t step = here.count() * 16;
  uint32_t at = 0;
  if (step == 16) {
    _Pragma("unroll 1") for (; at + kPartBytes <= bytes; at += kPartBytes) {
      store_part_alone(to + at, from + at);
    }
  }
  for (at += here.rank() * 16; at < bytes; at += step) {
    word::store(to + at, load_shared(from + at));
  }
}

struct memory {
  alignas(128) char buffer[kPieces * kPieceBytes];
  alignas(8) uint64_t arrivals[kPieces];
};
FW_DEVICE uint32_t memory_of_block() {
  __shared__ alignas(128) char bytes[sizeof(memory)];
  return shared_address(bytes);
}
FW_DEVICE uint32_t piece_of(uint32_t at) { return memory_of_block() + at % sizeof(memory::buffer); }
FW_DEVICE uint32_t barrier_of(uint32_t at) {
  return memory_of_block() + uint32_t(sizeof(memory::buffer)) + at / kPieceBytes % kPieces * 8;
}
FW_DEVICE uint32_t* lock_of_block() { return &staging_locks[blockIdx.x % kStagingLocks]; }

FW_DEVICE void fetch(uint64_t origin, uint32_t at, uint32_t end) {
  const uint32_t rest = end - at;
  fetch_piece(piece_of(at), origin + at, rest < kPieceBytes ? rest : kPieceBytes, barrier_of(at));
}
FW_DEVICE void wait_for_piece(uint32_t at) {
  wait_for_phase(barrier_of(at), at / uint32_t(sizeof(memory::buffer)) & 1);
}
FW_DEVICE void end_barriers() {
  FW_UNROLL
  for (uint32_t k = 0; k < kPieces; k++) end_barrier(barrier_of(k * kPieceBytes));
}

}  // namespace staging

// Whether a copy from `origin` to a frame is the faster way through the buffer, which needs that
// all are aligned. Frames are.
FW_DEVICE bool is_staged(lanes here, uint64_t origin, uint64_t bytes) {
  return here.count() <= kStagingLanes && (origin | bytes) % 16 == 0 && bytes >= 256;
}

// Tries to take the block's buffer, by the leader. A fence_acquire() follows: the last user's loads
// from the buffer are over.
FW_DEVICE bool try_buffer() { return atomic::or_relaxed(staging::lock_of_block(), 1) == 0; }

// Takes the block's buffer for a copy, by at most `tries`. Returns false if it did not come free.
FW_DEVICE bool take_buffer(lanes here, uint32_t tries) {
  bool got = false;
  if (here.leads()) {
    for (uint32_t k = 0; k < tries && !got; k++) {
      if (k != 0) base::pause(200);
      // Acquire: the last user's loads from the buffer are over.
      got = atomic::or_acquire(staging::lock_of_block(), 1) == 0;
    }
  }
  return here.broadcast(got);
}
// Gives the buffer back, by the leader, and behind a fence: our loads from the buffer are over.
FW_DEVICE void give_buffer() { atomic::store_relaxed(staging::lock_of_block(), uint32_t(0)); }

// Starts to fetch, by the leader. The lanes synchronise before any of them waits for what comes, by
// `end_staged` or `cancel_staged`. `changes` says that lanes may have stored to the source.
FW_DEVICE void begin_staged(uint64_t origin, uint64_t bytes, bool changes) {
  FW_UNROLL
  for (uint32_t k = 0; k < kPieces; k++) {
    staging::init_barrier(staging::barrier_of(k * kPieceBytes));
  }
  staging::fence_buffer();
  if (changes) staging::fence_source();
  const uint32_t end = uint32_t(bytes);
  FW_UNROLL
  for (uint32_t at = 0; at < kPieces * kPieceBytes; at += kPieceBytes) {
    if (at < end) staging::fetch(origin, at, end);
  }
}

// Stores what was fetched to the frame, and fetches the rest of longer lines. `take.piece(at,
// from)` gets each piece: its first byte in the line, and its address in shared memory.
template <typename Take>
FW_DEVICE void end_staged(lanes here, uint64_t target, uint64_t origin, uint64_t bytes,
                          Take& take) {
  const bool leads = here.leads();
  const uint32_t end = uint32_t(bytes);
  for (uint32_t at = 0; at < end; at += kPieceBytes) {
    staging::wait_for_piece(at);
    const uint32_t rest = end - at;
    take.piece(at, staging::piece_of(at));
    staging::store_piece(here, reinterpret_cast<char*>(target) + at, staging::piece_of(at),
                         rest < kPieceBytes ? rest : kPieceBytes);
    const uint32_t next = at + kPieces * kPieceBytes;
    if (next >= end) continue;
    // All lanes have loaded the piece before another takes its place.
    here.sync();
    if (leads) {
      staging::fence_buffer();
      staging::fetch(origin, next, end);
    }
  }
  // No lane waits any more.
  here.sync();
  if (leads) staging::end_barriers();
}

// Loads the 16 bytes around byte `offset` of a piece that was fetched to `from`, if it is in there.
FW_DEVICE void load_staged(atomic::word16& value, uint64_t offset, uint32_t from) {
  if (offset < kPieceBytes) value = staging::load_shared(from + (uint32_t(offset) & ~15u));
}

// Ends a copy that has no frame: waits until nothing more comes.
FW_DEVICE_NOINLINE void cancel_staged(lanes here, uint64_t bytes) {
  const uint32_t end = uint32_t(bytes);
  for (uint32_t at = 0; at < end && at < kPieces * kPieceBytes; at += kPieceBytes) {
    staging::wait_for_piece(at);
  }
  here.sync();
  if (here.leads()) staging::end_barriers();
}

// Copies `bytes` from global memory to a frame, by few lanes. Returns false, and copies nothing, if
// the block's buffer did not come free.
FW_DEVICE_NOINLINE bool copy_staged(lanes here, uint64_t target, uint64_t origin, uint64_t bytes) {
  struct {
    FW_DEVICE void piece(uint32_t, uint32_t) {}
  } nothing;
  if (!take_buffer(here, kStagingTries)) return false;
  if (here.leads()) begin_staged(origin, bytes, true);
  // The barriers are there before any lane waits at them.
  here.sync();
  end_staged(here, target, origin, bytes, nothing);
  if (here.leads()) {
    atomic::fence();
    give_buffer();
  }
  return true;
}

#else

inline constexpr bool kHasStaging = false;
FW_DEVICE constexpr bool is_staged(lanes, uint64_t, uint64_t) { return false; }
FW_DEVICE constexpr bool try_buffer() { return false; }
FW_DEVICE constexpr void give_buffer() {}
FW_DEVICE constexpr void begin_staged(uint64_t, uint64_t, bool) {}
template <typename Take>
FW_DEVICE constexpr void end_staged(lanes, uint64_t, uint64_t, uint64_t, Take&) {}
FW_DEVICE constexpr void cancel_staged(lanes, uint64_t) {}
FW_DEVICE void load_staged(atomic::word16&, uint64_t, uint32_t) {}
FW_DEVICE constexpr bool copy_staged(lanes, uint64_t, uint64_t, uint64_t) { return false; }

#endif

}  // namespace fw::warp
