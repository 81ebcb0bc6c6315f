#include "pipeline/host_queue_pair.h"

#include "base/alignment.h"
#include "base/require.h"

namespace fw::native::pipeline {
namespace {

constexpr uint64_t kRingPageBytes = 4096;

uint64_t sq_bytes(uint32_t depth) {
  return round_up(depth * sizeof(nvme::command), kRingPageBytes);
}
uint64_t cq_bytes(uint32_t depth) {
  return round_up(depth * sizeof(nvme::completion), kRingPageBytes);
}

uint32_t checked(uint32_t depth) {
  require(depth >= 2 && depth <= 1 << 15, "a queue pair has 2 to 32768 entries");
  return depth;
}

}  // namespace

HostQueuePair::HostQueuePair(uint32_t depth, uint16_t id)
    : depth_(checked(depth)),
      id_(id),
      memory_(sq_bytes(depth) + cq_bytes(depth) + kRingPageBytes, kRingPageBytes),
      sq_(static_cast<nvme::command*>(memory_.address())),
      cq_(reinterpret_cast<nvme::completion*>(static_cast<char*>(memory_.address()) +
                                              sq_bytes(depth))),
      bells_(reinterpret_cast<uint32_t*>(static_cast<char*>(memory_.address()) + sq_bytes(depth) +
                                         cq_bytes(depth))) {}

QueuePairAddresses HostQueuePair::addresses() const {
  const auto at = [](const void* p) { return reinterpret_cast<uint64_t>(p); };
  return {at(sq_), at(cq_), at(&bells_[0]), at(&bells_[kBellWords]), depth_, id_};
}

}  // namespace fw::native::pipeline
