// The submitter's side of a queue pair whose rings and doorbells are host memory.
//
// A worker owns it: one thread at a time. Posting and ringing are separate calls.
#pragma once

#include <cstdint>

#include "base/host_memory.h"
#include "flashwarp/base/atomic.cuh"
#include "flashwarp/nvme/command.cuh"
#include "nvme/controller.h"

namespace fw::native::pipeline {

class HostQueuePair {
 public:
  // `depth` entries in each ring, 2 at least; at most depth - 1 commands are in flight.
  HostQueuePair(uint32_t depth, uint16_t id);

  // For the controller, which must end before this object does.
  QueuePairAddresses addresses() const;

  uint32_t free_slots() const { return depth_ - 1 - in_flight_; }
  uint32_t in_flight() const { return in_flight_; }

  // Writes a command to the ring, where there must be a free slot.
  void post(const nvme::command& entry) {
    sq_[tail_] = entry;
    tail_ = tail_ + 1 == depth_ ? 0 : tail_ + 1;
    ++in_flight_;
  }

  // Makes the controller see what was posted. Returns whether there was anything.
  bool ring() {
    if (rung_ == tail_) return false;
    rung_ = tail_;
    // Release: the controller reads the entries, and the data of writes, after the doorbell.
    atomic::store_release(&bells_[0], tail_);
    return true;
  }

  // Calls ended(cid, status) for each completion. Returns their number.
  template <typename Ended>
  uint32_t reap(Ended ended) {
    uint32_t count = 0;
    while (true) {
      // Acquire: the entry, and the data of a read, were written before the phase tag.
      const uint64_t upper =
          atomic::load_acquire(reinterpret_cast<const uint64_t*>(&cq_[head_]) + 1);
      if ((upper >> 48 & 1) != phase_) break;
      head_ = head_ + 1 == depth_ ? 0 : head_ + 1;
      if (head_ == 0) phase_ ^= 1;
      --in_flight_;
      ++count;
      ended(uint16_t(upper >> 32), uint16_t(upper >> 49));
    }
    // Release: the controller overwrites the entries once it sees the new head.
    if (count != 0) atomic::store_release(&bells_[kBellWords], head_);
    return count;
  }

 private:
  static constexpr uint32_t kBellWords = 16;  // a cache line each

  const uint32_t depth_;
  const uint16_t id_;
  HostMemory memory_;
  nvme::command* const sq_;
  nvme::completion* const cq_;
  uint32_t* const bells_;
  uint32_t tail_ = 0, rung_ = 0, head_ = 0, in_flight_ = 0;
  uint16_t phase_ = 1;
};

}  // namespace fw::native::pipeline
