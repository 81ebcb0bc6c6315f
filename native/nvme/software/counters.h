// Counts what a queue pair has served, by kind of command.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "flashwarp/nvme/command.cuh"

namespace fw::native {

enum class CommandKind : uint8_t {
  kFlush,
  kWrite,
  kRead,
  kWriteZeroes,
  kDatasetManagement,
  kIdentify,
  kOther,
  kCount,
};
inline constexpr size_t kCommandKinds = size_t(CommandKind::kCount);

inline const char* command_name(CommandKind kind) {
  static constexpr const char* kNames[kCommandKinds] = {
      "flush", "write", "read", "write_zeroes", "dataset_management", "identify", "other"};
  return kNames[size_t(kind)];
}

// Queue 0 is the admin queue, whose opcodes have other meanings.
inline CommandKind kind_of(uint16_t queue, const nvme::command& entry) {
  const uint8_t opcode = uint8_t(entry.opcode_cid);
  if (queue == 0) return opcode == nvme::kIdentify ? CommandKind::kIdentify : CommandKind::kOther;
  switch (opcode) {
    case nvme::kFlush:
      return CommandKind::kFlush;
    case nvme::kWrite:
      return CommandKind::kWrite;
    case nvme::kRead:
      return CommandKind::kRead;
    case nvme::kWriteZeroes:
      return CommandKind::kWriteZeroes;
    case nvme::kDatasetManagement:
      return CommandKind::kDatasetManagement;
    default:
      return CommandKind::kOther;
  }
}

// Only the holder of the serve lock writes it, and any thread reads it. So relaxed accesses are
// enough, without locked instructions.
class Counter {
 public:
  void add(uint64_t n) {
    value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct QueueCounters {
  std::array<Counter, kCommandKinds> commands;
  Counter bytes_read, bytes_written, errors, doorbell_reads, engine_operations, kernel_enters,
      engine_fallbacks, held;
};

}  // namespace fw::native
