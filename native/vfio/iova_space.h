// Allocates IO virtual addresses out of the ranges that an IOMMU translates.
//
// Addresses are lowest first, so that controllers and IOMMUs of few address bits reach them. Page
// zero is never given out: an address of 0 stays a mistake. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace fw::native::vfio {

// Bytes [first, last].
struct IovaRange {
  uint64_t first;
  uint64_t last;
};

class IovaSpace {
 public:
  explicit IovaSpace(std::vector<IovaRange> ranges) : ranges_(std::move(ranges)) {}

  // Returns the begin of `nbytes` free bytes at a multiple of `alignment`, a power of two; 0 if
  // there is no room.
  uint64_t take(uint64_t nbytes, uint64_t alignment);

  // Gives back what `take` returned.
  void give(uint64_t begin) { taken_.erase(begin); }

 private:
  // The first place at `from` or behind it that is aligned and meets no taken bytes.
  uint64_t next_free(uint64_t from, uint64_t nbytes, uint64_t alignment) const;

  const std::vector<IovaRange> ranges_;
  std::map<uint64_t, uint64_t> taken_;  // begin, size
};

}  // namespace fw::native::vfio
