// A bounded list of failed commands, which the host raises as exceptions.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fw::native {

struct ErrorRecord {
  std::string operation;  // "read", "write", "flush", ..., "doorbell"
  std::string path;
  std::string reason;
  uint64_t file_offset = 0;
  uint64_t nbytes = 0;
  uint64_t lba = 0;
  int error = 0;        // errno, or 0 when no system call failed
  uint16_t status = 0;  // NVMe status field without the phase tag
  uint16_t queue = 0;
  uint16_t cid = 0;
  bool recovered = false;  // another replica served the command after all
  double unix_time = 0;
};

// Keeps the first records, because the cause comes before its consequences.
class ErrorLog {
 public:
  static constexpr size_t kRecordsMax = 64;

  void add(ErrorRecord record) {
    const std::lock_guard guard(lock_);
    if (records_.size() == kRecordsMax) {
      ++dropped_;
    } else {
      records_.push_back(std::move(record));
    }
  }

  // Returns the records and empties the log.
  std::vector<ErrorRecord> take() {
    const std::lock_guard guard(lock_);
    return std::exchange(records_, {});
  }

  // How many records did not fit since the log was made.
  uint64_t dropped() const {
    const std::lock_guard guard(lock_);
    return dropped_;
  }

 private:
  mutable std::mutex lock_;
  std::vector<ErrorRecord> records_;
  uint64_t dropped_ = 0;
};

}  // namespace fw::native
