#include "launch/plan.h"

#include <cstring>

namespace fw::native {
namespace {

// How a launch uses the list of misses, `cache::list_use`, the last member of its parameter.
struct ListUse {
  uint64_t list, launch;
  uint32_t blocks, bundle;
};

}  // namespace

uint64_t launch_number() {
  static std::atomic<uint64_t> numbers{1};
  constexpr uint64_t kMask = (uint64_t{1} << 41) - 1;  // device code has 41 bits for it
  return numbers.fetch_add(1, std::memory_order_relaxed) & kMask;
}

void RowParameter::point_to(const RowOperands& operands, uint64_t look_ahead, uint64_t strays) {
  const uint64_t late[] = {look_ahead, strays};
  std::memcpy(bytes_.data() + members_.own_at, &operands, sizeof operands);
  std::memcpy(bytes_.data() + members_.look_ahead_at, late, sizeof late);
  ListUse use;
  uint8_t* const place = bytes_.data() + bytes_.size() - sizeof use;
  std::memcpy(&use, place, sizeof use);
  if (use.list == 0) return;
  use.launch = launch_number();
  std::memcpy(place, &use, sizeof use);
}

}  // namespace fw::native
