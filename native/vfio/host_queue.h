// A queue pair for commands of the host's own, one at a time: the admin queue, and one for I/O.
//
// Not thread-safe; drive.h has the locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "flashwarp/nvme/command.cuh"
#include "vfio/dma_region.h"
#include "vfio/pci_function.h"

namespace fw::native::vfio {

class HostQueue {
 public:
  static constexpr uint32_t kDepth = 32;

  // Its memory, for the controller to be told of; the doorbells are those of queue `id`.
  HostQueue(std::shared_ptr<PciFunction> function, std::shared_ptr<Registers> registers,
            uint32_t doorbell_stride, uint16_t id);

  uint64_t sq_iova() const { return memory_.iova(); }
  uint64_t cq_iova() const { return memory_.iova() + kMemoryPageBytes; }
  uint16_t id() const { return id_; }

  // Writes the command to the ring with an identifier of its own, which it returns, and rings.
  uint16_t submit(nvme::command entry);

  // Waits for that command; completions of commands that were given up are dropped. Returns false
  // after `limit_ms`, or once `lost` is set.
  bool wait(uint16_t cid, int64_t limit_ms, const std::atomic<bool>& lost,
            nvme::completion& result);

 private:
  bool take(nvme::completion& result);

  const std::shared_ptr<Registers> registers_;
  const DmaMemory memory_;  // a page for each ring
  const uint32_t sq_doorbell_, cq_doorbell_;
  const uint16_t id_;
  uint16_t cid_ = 0;
  uint32_t tail_ = 0, head_ = 0;
  uint16_t phase_ = 1;
};

}  // namespace fw::native::vfio
