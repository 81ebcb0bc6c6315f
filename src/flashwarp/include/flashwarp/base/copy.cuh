// Warp-cooperative copies between storage memory, cache frames and user buffers.
//
// The lanes in `mask` split one copy among them, at the widest access that the three of source,
// destination and length allow. Frames are read and written with relaxed atomics (see atomic.cuh).
#pragma once

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"

namespace fw::warp {

// How the source may be read: `kFrame` can change under us; `kStream` is global memory that is read
// once and stays put; `kOwn` is memory of the caller's, of any kind.
enum class source { kFrame, kStream, kOwn };

// Independent accesses that one lane keeps in flight.
inline constexpr uint32_t kCopyUnroll = 8;

template <uint32_t kBytes, source kSource>
FW_DEVICE typename atomic::raw<kBytes>::type load_word(const char* from) {
  using word = atomic::raw<kBytes>;
  if constexpr (kSource == source::kFrame) return word::load(from);
  if constexpr (kSource == source::kStream) return word::load_stream(from);
  if constexpr (kSource == source::kOwn) return word::load_plain(from);
}

// What comes from a frame ends in the caller's memory; all else in a frame that others may read.
template <uint32_t kBytes, source kSource>
FW_DEVICE void store_word(char* to, typename atomic::raw<kBytes>::type value) {
  using word = atomic::raw<kBytes>;
  kSource == source::kFrame ? word::store_plain(to, value) : word::store(to, value);
}

template <uint32_t kBytes, source kSource>
FW_DEVICE void copy_words(uint32_t mask, char* target, const char* origin, uint64_t bytes) {
  const uint64_t words = bytes / kBytes;
  const uint32_t lanes = base::popcount(mask);
  const uint64_t step = uint64_t(lanes) * kBytes;
  uint64_t w = rank_in(mask);
  // Whole rounds without a condition: one inside would make each load wait for the one before.
  for (; w - rank_in(mask) + uint64_t(lanes) * kCopyUnroll <= words;
       w += uint64_t(lanes) * kCopyUnroll) {
    typename atomic::raw<kBytes>::type values[kCopyUnroll];
    FW_UNROLL
    for (uint32_t u = 0; u < kCopyUnroll; u++) {
      values[u] = load_word<kBytes, kSource>(origin + w * kBytes + u * step);
    }
    FW_UNROLL
    for (uint32_t u = 0; u < kCopyUnroll; u++) {
      store_word<kBytes, kSource>(target + w * kBytes + u * step, values[u]);
    }
  }
  for (; w < words; w += lanes) {
    store_word<kBytes, kSource>(target + w * kBytes,
                                load_word<kBytes, kSource>(origin + w * kBytes));
  }
}

// The widths that aligned rows never need, out of the way of the code that they share a kernel
// with. As wide as all three allow: an element of up to 8 bytes that is aligned to its size, on
// both sides, goes in one access, so that a copy beside a store has it before or after, never
// parts.
template <source kSource>
FW_DEVICE_NOINLINE void copy_narrow(uint32_t mask, char* to, const char* from, uint64_t bytes) {
  const uint64_t all = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes;
  if (all % 8 == 0) {
    copy_words<8, kSource>(mask, to, from, bytes);
  } else if (all % 4 == 0) {
    copy_words<4, kSource>(mask, to, from, bytes);
  } else if (all % 2 == 0) {
    copy_words<2, kSource>(mask, to, from, bytes);
  } else {
    copy_words<1, kSource>(mask, to, from, bytes);
  }
}

// Copies `bytes` from `origin` to `target`; the ranges must not overlap.
template <source kSource>
FW_DEVICE void copy(uint32_t mask, uint64_t target, uint64_t origin, uint64_t bytes) {
  char* to = reinterpret_cast<char*>(target);
  const char* from = reinterpret_cast<const char*>(origin);
  uint64_t done = 0;
  if ((target | origin) % 16 == 0) {
    done = bytes & ~uint64_t(15);
    copy_words<16, kSource>(mask, to, from, done);
  }
  if (done != bytes) copy_narrow<kSource>(mask, to + done, from + done, bytes - done);
}

}  // namespace fw::warp
