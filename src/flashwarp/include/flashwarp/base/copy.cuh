// Warp-cooperative copies between storage memory, cache frames and user buffers.
//
// The lanes of `here` divide one copy, by the widest accesses that source, target and length allow.
// Frames are read and written with relaxed atomics (see atomic.cuh).
#pragma once

#include "flashwarp/base/staging.cuh"

namespace fw::warp {

// The kind of source. `kFrame` is a frame, which may change during the copy. `kStream` is global
// memory that is read once and does not change. `kStorage` is the same, for a copy to memory of the
// caller. `kOwn` is any memory of the caller.
enum class source { kFrame, kStream, kStorage, kOwn };

template <uint32_t kBytes, source kSource>
FW_DEVICE typename atomic::raw<kBytes>::type load_word(const char* from) {
  using word = atomic::raw<kBytes>;
  if constexpr (kSource == source::kFrame) return word::load(from);
  if constexpr (kSource == source::kStream || kSource == source::kStorage) {
    return word::load_stream(from);
  }
  if constexpr (kSource == source::kOwn) return word::load_plain(from);
}

// A copy from a frame, or around the cache, goes to memory of the caller. Every other copy goes to
// a frame, which other warps may read.
template <uint32_t kBytes, source kSource>
FW_DEVICE void store_word(char* to, typename atomic::raw<kBytes>::type value) {
  using word = atomic::raw<kBytes>;
  constexpr bool kToCaller = kSource == source::kFrame || kSource == source::kStorage;
  kToCaller ? word::store_plain(to, value) : word::store(to, value);
}

template <uint32_t kBytes, source kSource>
FW_DEVICE void copy_words(lanes here, char* target, const char* origin, uint64_t bytes) {
  const uint64_t words = bytes / kBytes;
  const uint32_t width = here.count();
  const uint64_t step = uint64_t(width) * kBytes;
  uint64_t w = here.rank();
  // Whole rounds have no condition inside, which would make each load wait for the one before.
  for (; w - here.rank() + uint64_t(width) * kCopyUnroll <= words;
       w += uint64_t(width) * kCopyUnroll) {
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
  for (; w < words; w += width) {
    store_word<kBytes, kSource>(target + w * kBytes,
                                load_word<kBytes, kSource>(origin + w * kBytes));
  }
}

// Copies by 8, 4, 2 or 1 bytes. Not inlined, because aligned rows never need it. It takes the
// widest access that source, target and length allow. So it copies an element of up to 8 bytes that
// is aligned on both sides in one access, and never takes parts of it from two stores.
template <source kSource>
FW_DEVICE_NOINLINE void copy_narrow(lanes here, char* to, const char* from, uint64_t bytes) {
  const uint64_t all = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes;
  if (all % 8 == 0) {
    copy_words<8, kSource>(here, to, from, bytes);
  } else if (all % 4 == 0) {
    copy_words<4, kSource>(here, to, from, bytes);
  } else if (all % 2 == 0) {
    copy_words<2, kSource>(here, to, from, bytes);
  } else {
    copy_words<1, kSource>(here, to, from, bytes);
  }
}

// Copies `bytes` from `origin` to `target`; the ranges must not overlap.
template <source kSource>
FW_DEVICE void copy(lanes here, uint64_t target, uint64_t origin, uint64_t bytes) {
  if constexpr (kSource == source::kStream) {
    const bool staged = target % 16 == 0 && is_staged(here, origin, bytes);
    if (staged && copy_staged(here, target, origin, bytes)) return;
  }
  char* to = reinterpret_cast<char*>(target);
  const char* from = reinterpret_cast<const char*>(origin);
  if (base::copy_at_once(to, from, bytes)) return;
  uint64_t done = 0;
  if ((target | origin) % 16 == 0) {
    done = bytes & ~uint64_t(15);
    copy_words<16, kSource>(here, to, from, done);
  }
  if (done != bytes) copy_narrow<kSource>(here, to + done, from + done, bytes - done);
}

// Copies for each lane of `members` its own `bytes` from `origin` to `target`. All lanes of `here`
// copy together, for one member after the other.
template <source kSource>
FW_DEVICE void copy_each(lanes here, lanes members, uint64_t target, uint64_t origin,
                         uint64_t bytes) {
  for (const uint32_t member : members) {
    copy<kSource>(here, here.broadcast(target, member), here.broadcast(origin, member),
                  here.broadcast(bytes, member));
  }
}

}  // namespace fw::warp
