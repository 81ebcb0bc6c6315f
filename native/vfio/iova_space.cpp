// First fit; see iova_space.h.
#include "vfio/iova_space.h"

#include <algorithm>

#include "base/alignment.h"

namespace fw::native::vfio {

uint64_t IovaSpace::next_free(uint64_t from, uint64_t nbytes, uint64_t alignment) const {
  uint64_t at = round_up(from, alignment);
  for (const auto& [begin, size] : taken_) {
    if (begin + size <= at) continue;
    if (begin >= at + nbytes) break;
    at = round_up(begin + size, alignment);
  }
  return at;
}

uint64_t IovaSpace::take(uint64_t nbytes, uint64_t alignment) {
  if (nbytes == 0) return 0;
  for (const IovaRange& range : ranges_) {
    const uint64_t first = std::max(range.first, alignment);
    if (range.last < first) continue;
    const uint64_t at = next_free(first, nbytes, alignment);
    // Compared without sums that wrap: the last range may end at 2^64 - 1.
    if (at < first || at > range.last || nbytes - 1 > range.last - at) continue;
    taken_[at] = nbytes;
    return at;
  }
  return 0;
}

}  // namespace fw::native::vfio
