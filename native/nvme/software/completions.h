// Ends the current command: counts it, records a failure, and posts or holds its completion.
#pragma once

#include <cstdint>

#include "nvme/model/drive_queue.h"
#include "nvme/software/command_memory.h"
#include "nvme/software/counters.h"
#include "nvme/software/rings.h"

namespace fw::native {

// The bits of CDW12 with the number of blocks, less one.
inline constexpr uint32_t kNlbMask = 0xFFFF;

inline uint8_t opcode_of(const nvme::command& entry) { return uint8_t(entry.opcode_cid); }
inline uint16_t cid_of(const nvme::command& entry) { return uint16_t(entry.opcode_cid >> 16); }
inline uint64_t first_lba(const nvme::command& entry) {
  return entry.cdw10 | (uint64_t(entry.cdw11) << 32);
}

// Status field for an errno value; 0 is success.
uint16_t status_of_error(int error, bool is_write);

class Completions {
 public:
  // Without a modelled drive (null), completions are posted as soon as they are known.
  Completions(Rings& rings, ErrorLog& errors, QueueCounters& counters, DriveQueue* drive)
      : rings_(rings), errors_(errors), counters_(counters), drive_(drive) {}

  // When the current command is due. Commands in flight keep the value meanwhile.
  int64_t due_ns() const { return drive_ == nullptr ? 0 : drive_->due_ns(); }
  void set_due_ns(int64_t due_ns) {
    if (drive_ != nullptr) drive_->set_due_ns(due_ns);
  }

  void complete(uint16_t cid, uint16_t status) {
    if (drive_ != nullptr && drive_->hold(cid, status)) {
      counters_.held.add(1);
    } else {
      rings_.post(cid, status);
    }
  }

  void finish(const nvme::command& entry, uint16_t status);
  void finish_io(const nvme::command& entry, const ByteRange& range, bool is_write, int error,
                 const IoFailure& failure);
  void reject(const nvme::command& entry, uint16_t status, const char* reason);

  // Records a failure. `recovered` says that another replica serves the command.
  void record(const nvme::command& entry, uint16_t status, int error, const IoFailure& failure,
              const char* reason, bool recovered);

 private:
  Rings& rings_;
  ErrorLog& errors_;
  QueueCounters& counters_;
  DriveQueue* const drive_;
};

}  // namespace fw::native
