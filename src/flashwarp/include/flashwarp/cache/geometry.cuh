// What a hit needs of the cache: the addresses of tags and frames, and the set of a line.
//
// It never changes, so kernels have it by value. As part of their parameters it is in constant
// memory, and a hit loads nothing but tags and data.
#pragma once

#include "flashwarp/base/platform.cuh"

namespace fw::cache {

struct geometry {
  uint64_t* tags;  // set_count * ways
  char* frames;    // set_count * ways * line_bytes
  uint64_t set_count;
  uint64_t set_reciprocal;  // ceil(2^64 / set_count)
  uint32_t ways;            // 4, 8 or 16
  uint32_t line_shift;
};
static_assert(sizeof(geometry) == 40);

// The set of a line, and the way where a probe begins.
struct home {
  uint64_t set;
  uint32_t likely;  // the first way, which is even, of the line's likely pair
};

// Line modulo set count by multiplication, exact while line * set_count < 2^64. The quotient gives
// each line of a set a likely pair of ways. A fill takes a way of that pair while one is empty, so
// if all data fits the cache, a probe finds a line in the pair that it reads first.
FW_HOST_DEVICE home home_of(const geometry& g, uint64_t line) {
  const uint64_t quotient = g.set_count == 1 ? line : base::multiply_high(line, g.set_reciprocal);
  return {line - quotient * g.set_count, uint32_t(quotient * 2) & (g.ways - 1)};
}
FW_HOST_DEVICE uint64_t set_of(const geometry& g, uint64_t line) { return home_of(g, line).set; }
FW_HOST_DEVICE uint64_t line_bytes(const geometry& g) { return uint64_t(1) << g.line_shift; }
FW_HOST_DEVICE char* frame_of(const geometry& g, uint64_t way_index) {
  return g.frames + (way_index << g.line_shift);
}

// The 32 bits that a replacement policy may keep for each line, in caches whose policy keeps words.
// They follow the tags at a multiple of 128 bytes (a memory line), so they need no pointer.
inline constexpr uint64_t kPolicyWordsAlignment = 128;
FW_HOST_DEVICE uint32_t* policy_word(const geometry& g, uint64_t way_index) {
  const uint64_t tag_bytes = g.set_count * g.ways * sizeof(uint64_t);
  const uint64_t distance = (tag_bytes + kPolicyWordsAlignment - 1) & ~(kPolicyWordsAlignment - 1);
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(g.tags) + distance) + way_index;
}

// Counts requests of a policy for ways or words that do not exist. It is the word before the tags,
// so that hits, which have no other address, can count them too.
FW_HOST_DEVICE uint64_t* policy_refusals(const geometry& g) { return g.tags - 1; }

}  // namespace fw::cache
