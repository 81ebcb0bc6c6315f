// The queue pairs of one array on a drive: the drive itself is the controller that serves them.
//
// The rings are driven by device code, through the drive's own doorbells. This object creates the
// queues in the drive, deletes them, and ends all waits when the drive is lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nvme/controller.h"
#include "vfio/dma_region.h"
#include "vfio/drive.h"

namespace fw::native::vfio {

// Numbers of queue pairs of a drive, and its registers, until `release`.
class QueueLease {
 public:
  QueueLease(std::shared_ptr<Drive> drive, uint32_t count);
  ~QueueLease() { release(); }
  QueueLease(const QueueLease&) = delete;
  QueueLease& operator=(const QueueLease&) = delete;

  const std::vector<uint16_t>& ids() const { return ids_; }
  // Addresses of the doorbells of the SQ and the CQ.
  std::vector<std::pair<uint64_t, uint64_t>> doorbells() const;
  const std::shared_ptr<Drive>& drive() const { return drive_; }
  const Registers& registers() const { return *registers_; }

  // A GPU has the registers mapped, too: they stay where they are until `release`, whose caller has
  // ended the GPU's mapping before, and so its kernels' late stores.
  void hold() { held_ = true; }
  bool held() const { return held_; }

  // The drive is lost: late stores of CPU threads go nowhere from here on.
  void detach() {
    if (!held_) registers_->detach();
  }
  void release();

 private:
  const std::shared_ptr<Drive> drive_;
  const std::shared_ptr<Registers> registers_;
  const std::vector<uint16_t> ids_;
  std::atomic<bool> held_{false}, released_{false};
};

class DriveQueues final : public Controller, private DriveUser {
 public:
  // `pairs` have the numbers and doorbells of the lease, and rings in `rings` on page boundaries.
  // Commands name memory of `data`. The rings of a GPU are the first pages of `rings_file`, its
  // dma-buf.
  DriveQueues(std::shared_ptr<QueueLease> lease, std::vector<QueuePairAddresses> pairs,
              std::pair<uint64_t, uint64_t> rings, std::shared_ptr<DataRegion> data,
              int rings_file = kNoFile);
  ~DriveQueues() override { stop(); }

  // Words that end all waits of device code for a pair, if the host can store to them.
  void set_failed_words(std::vector<uint64_t> addresses);

  // Creates the queues in the drive. Not after `stop`: a drive's queues begin empty.
  void start() override;
  void stop() override;
  bool serving() const override { return serving_.load(std::memory_order_acquire); }
  // Ends what the drive does for device code, before others may have the blocks: once this returns,
  // no command is in flight, none is fetched any more, and all waits of CPU threads end. The memory
  // stays mapped until `stop`. Blocks, for as long as the commands in flight take.
  void retire(const std::string& why);
  int serve_some(uint32_t) override { return serving() ? 0 : -1; }
  ControllerProgress progress() const override { return {}; }
  // The drive keeps its own log, see Drive::error_log.
  std::vector<ErrorRecord> take_errors() override { return {}; }
  Description describe() const override;

  // Why nothing completes any more; empty while the drive serves.
  std::string lost() const;

 private:
  void lose(const std::string& why) override;
  std::vector<QueuePairPlace> places() const;

  const std::shared_ptr<QueueLease> lease_;
  const std::shared_ptr<Drive> drive_;
  std::shared_ptr<DataRegion> data_;
  std::unique_ptr<DmaRegion> rings_;

  mutable std::mutex life_;
  bool stopped_ = false;
  std::atomic<bool> serving_{false};
  mutable std::mutex loss_;  // the words and the reason
  std::vector<uint64_t> failed_words_;
  std::string why_lost_;
};

}  // namespace fw::native::vfio
