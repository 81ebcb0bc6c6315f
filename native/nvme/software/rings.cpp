#include "nvme/software/rings.h"

#include <algorithm>
#include <ctime>
#include <string>
#include <utility>

namespace fw::native {

Rings::Rings(const QueuePairAddresses& addresses, ErrorLog& errors, QueueCounters& counters)
    : sq_(reinterpret_cast<nvme::command*>(addresses.sq)),
      cq_(reinterpret_cast<nvme::completion*>(addresses.cq)),
      sq_doorbell_(reinterpret_cast<const uint32_t*>(addresses.sq_doorbell)),
      cq_doorbell_(reinterpret_cast<const uint32_t*>(addresses.cq_doorbell)),
      depth_(addresses.depth),
      id_(addresses.id),
      errors_(errors),
      counters_(counters) {}

uint32_t Rings::fetchable_until(uint32_t tail, uint32_t promised) {
  if (tail >= depth_) {
    fail("the SQ tail doorbell is outside of the ring", tail);
    return 0;
  }
  const uint32_t rung = std::min(kVisitMax, tail >= head_ ? tail - head_ : tail + depth_ - head_);
  const auto room = [this, promised] {
    const uint32_t unconsumed =
        cq_tail_ >= cq_head_seen_ ? cq_tail_ - cq_head_seen_ : cq_tail_ + depth_ - cq_head_seen_;
    return depth_ - 1 - unconsumed - promised;
  };
  if (room() >= rung) return rung;
  if (!read_cq_doorbell()) return 0;
  return std::min(rung, room());
}

bool Rings::read_cq_doorbell() {
  // Acquire: the consumer has read the entries that `post` overwrites next.
  const uint32_t value = atomic::load_acquire(cq_doorbell_);
  const auto distance = [&](uint32_t to) {
    return to >= cq_head_seen_ ? to - cq_head_seen_ : to + depth_ - cq_head_seen_;
  };
  if (value >= depth_ || distance(value) > distance(cq_tail_)) {
    fail("the CQ head doorbell is beyond what was posted", value);
    return false;
  }
  cq_head_seen_ = value;
  return true;
}

void Rings::fail(const char* what, uint32_t value) {
  ErrorRecord record;
  record.operation = "doorbell";
  record.reason =
      std::string(what) + ": " + std::to_string(value) + ", depth " + std::to_string(depth_);
  record.queue = id_;
  record.unix_time = double(std::time(nullptr));
  errors_.add(std::move(record));
  counters_.errors.add(1);
  failed_ = true;
}

}  // namespace fw::native
