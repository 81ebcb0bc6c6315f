// A namespace whose bytes lie in several places: of memory, or of a drive.
//
// A table of parts is in the order of the namespace, without gaps, and its last part ends the
// namespace. It does not change while kernels use it, so its loads need no order.
#pragma once

#include "flashwarp/base/platform.cuh"

namespace fw::nvme {

struct namespace_part {
  uint64_t end;   // the byte of the namespace behind its last
  uint64_t base;  // where its first byte lies, less that byte's number in the namespace
};
static_assert(sizeof(namespace_part) == 16);

// The number of the part that has byte `at` of the namespace, by a load for each halving of
// `count`, which is not 0.
FW_HOST_DEVICE uint64_t find_part(const namespace_part* parts, uint64_t count, uint64_t at) {
  uint64_t low = 0;
  for (uint64_t high = count - 1; low < high;) {
    const uint64_t middle = (low + high) / 2;
    const bool behind = parts[middle].end <= at;
    low = behind ? middle + 1 : low;
    high = behind ? high : middle;
  }
  return low;
}

}  // namespace fw::nvme
