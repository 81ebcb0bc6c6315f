#include "nvme/model/drive_queue.h"

namespace fw::native {

DriveQueue::DriveQueue(ModelledDrive& drive, uint32_t held_max, uint32_t batch_max)
    : drive_(drive), held_(held_max, monotonic_ns()) {
  arrivals_.reserve(batch_max);
  arrival_cids_.reserve(batch_max);
  arrival_dues_.resize(batch_max);
}

void DriveQueue::admit(bool is_write, uint32_t blocks) {
  const ModelledDrive::Arrival arrival = {blocks, is_write};
  drive_.admit(now_ns_, {&arrival, 1}, &due_ns_);
}

}  // namespace fw::native
