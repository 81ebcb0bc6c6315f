// What a hit must know of the cache: where its tags and frames are, and which set a line is in.
//
// Never changes, so kernels carry it by value: as part of their parameters it lies in constant
// memory, and a hit touches nothing but tags and data.
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

// Where a line may be.
struct home {
  uint64_t set;
  uint32_t likely;  // the even way of the pair that is looked at first
};

// Line modulo set count by multiplication: exact while line * set_count < 2^64. The quotient deals
// the lines of a set to its pairs of ways: a line goes to its likely pair while that has room, so
// what fits the cache is found at the first look.
FW_HOST_DEVICE home home_of(const geometry& g, uint64_t line) {
  const uint64_t quotient = g.set_count == 1 ? line : base::multiply_high(line, g.set_reciprocal);
  return {line - quotient * g.set_count, uint32_t(quotient * 2) & (g.ways - 1)};
}
FW_HOST_DEVICE uint64_t set_of(const geometry& g, uint64_t line) { return home_of(g, line).set; }
FW_HOST_DEVICE uint64_t line_bytes(const geometry& g) { return uint64_t(1) << g.line_shift; }
FW_HOST_DEVICE char* frame_of(const geometry& g, uint64_t way_index) {
  return g.frames + (way_index << g.line_shift);
}

// The 32 bits that a replacement policy may keep for each line. They follow the tags, at a distance
// that is a multiple of a memory line of 128 bytes, so that they need no pointer of their own. Only
// caches whose policy keeps words have them.
inline constexpr uint64_t kPolicyWordsAlignment = 128;
FW_HOST_DEVICE uint32_t* policy_word(const geometry& g, uint64_t way_index) {
  const uint64_t tag_bytes = g.set_count * g.ways * sizeof(uint64_t);
  const uint64_t distance = (tag_bytes + kPolicyWordsAlignment - 1) & ~(kPolicyWordsAlignment - 1);
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(g.tags) + distance) + way_index;
}

// How often a policy asked for what is not there, which a hit has to note too: the 64 bits before
// the tags, in front of which they are aligned like the policy's words.
FW_HOST_DEVICE uint64_t* policy_refusals(const geometry& g) { return g.tags - 1; }

}  // namespace fw::cache
