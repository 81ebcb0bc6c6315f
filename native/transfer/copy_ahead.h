// Guarded copies of pieces that lie apart, at memory speed.
//
// The processor does not see which piece comes next: while one group is copied, the next is
// fetched. That nearly doubles the rate of 4 KiB pieces.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/fault_guard.h"

namespace fw::native {

// Copies pieces [begin, end), of which `copy_of(i)` gives the addresses and `piece_bytes` the usual
// size. Returns the first that could not be read, or `end`. The guard's handler must be installed.
template <typename CopyOf>
uint64_t copy_ahead(uint64_t begin, uint64_t end, uint64_t piece_bytes, CopyOf copy_of) {
  // So much is asked for ahead of the copies: more would fall out of the first-level cache.
  constexpr uint64_t kAheadBytes = 4096;
  constexpr uint64_t kCacheLineBytes = 64;
  constexpr uint64_t kGroupMax = 64;
  const uint64_t group = std::clamp<uint64_t>(kAheadBytes / piece_bytes, 1, kGroupMax);
  GuardedCopy copies[kGroupMax];
  for (uint64_t i = begin; i < end; i += group) {
    for (uint64_t ahead = i + group; ahead < std::min(end, i + 2 * group); ++ahead) {
      const GuardedCopy next = copy_of(ahead);
      // A prefetch of a page that is gone does nothing.
      for (uint64_t at = 0; at < std::min<uint64_t>(next.nbytes, kAheadBytes);
           at += kCacheLineBytes) {
        __builtin_prefetch(static_cast<const char*>(next.source) + at);
      }
    }
    const auto count = uint32_t(std::min(group, end - i));
    for (uint32_t k = 0; k < count; ++k) copies[k] = copy_of(i + k);
    guarded_copy(copies, count);
    for (uint32_t k = 0; k < count; ++k) {
      if (copies[k].result == CopyResult::kFailed) return i + k;
    }
  }
  return end;
}

}  // namespace fw::native
