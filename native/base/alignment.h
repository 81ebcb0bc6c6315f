// Arithmetic of alignments that are powers of two.
#pragma once

#include <cstdint>

namespace fw::native {

// Of memory, and of the page cache.
inline constexpr uint64_t kPageBytes = 4096;

inline uint64_t round_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }
inline uint64_t round_up(uint64_t value, uint64_t alignment) {
  return round_down(value + alignment - 1, alignment);
}
inline bool is_aligned(uint64_t value, uint64_t alignment) {
  return (value & (alignment - 1)) == 0;
}

}  // namespace fw::native
