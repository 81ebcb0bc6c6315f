// The memory that the current command's PRP entries name, and copies to and from it.
//
// The submitter is not trusted: every page, and every list of pages, must be inside memory that was
// registered for transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "flashwarp/nvme/command.cuh"
#include "nvme/error_log.h"
#include "nvme/model/ssd_model.h"
#include "storage/storage.h"

namespace fw::native {

// Memory that commands may name, as (address, bytes).
class DmaRegions {
 public:
  explicit DmaRegions(std::vector<std::pair<uint64_t, uint64_t>> regions)
      : regions_(std::move(regions)) {}

  bool contains(uint64_t address, uint64_t nbytes) const {
    for (const auto& [start, size] : regions_) {
      const uint64_t offset = address - start;
      if (offset < size && nbytes <= size - offset) return true;
    }
    return false;
  }
  const std::vector<std::pair<uint64_t, uint64_t>>& list() const { return regions_; }

 private:
  std::vector<std::pair<uint64_t, uint64_t>> regions_;
};

// What all queue pairs of a software controller share. Read-only, except for the log and the
// modelled drive.
struct ControllerContext {
  std::shared_ptr<Storage> storage;
  DmaRegions regions;
  uint64_t page_bytes;
  uint64_t max_transfer_bytes;
  ErrorLog errors;
  std::unique_ptr<ModelledDrive> drive = nullptr;  // null: no drive is modelled

  // The LBAs of the namespace; a partial last one counts.
  uint64_t lbas() const { return (storage->nbytes() + nvme::kLbaBytes - 1) / nvme::kLbaBytes; }
};

// The bytes of the namespace that a command names. `total` counts a partial last LBA as whole.
struct ByteRange {
  uint64_t offset = 0;
  uint32_t take = 0;
  uint32_t total = 0;
};

class CommandMemory {
 public:
  explicit CommandMemory(const ControllerContext& context);

  // Finds the memory of a command that moves `nbytes`. Returns kSuccess, or the status for wrong
  // PRP entries; then there is no memory.
  uint16_t walk(const nvme::command& entry, uint64_t nbytes);

  // The memory if it is contiguous, else null.
  std::byte* contiguous() const {
    return segments_.size() == 1 ? segments_.front().address : nullptr;
  }

  void copy_to(uint64_t offset, const void* data, uint64_t nbytes);
  void copy_from(uint64_t offset, void* data, uint64_t nbytes) const;

  // Clears the bytes of a partial last LBA that lie past the end of the namespace.
  void zero_tail(const ByteRange& range);

  // Copy between the storage and the memory. Return 0 or an errno value. A read that may not wait
  // returns EAGAIN if it would have to.
  int read(const ByteRange& range, bool may_wait, IoFailure& failure);
  int write(const ByteRange& range, bool durable, IoFailure& failure);

 private:
  struct Segment {
    std::byte* address;
    uint64_t nbytes;
  };

  uint16_t append(uint64_t address, uint64_t nbytes);
  uint16_t walk_list(uint64_t list, uint64_t remaining);
  template <typename Move>
  int for_each_part(uint64_t offset, uint64_t nbytes, Move move) const;

  const ControllerContext& context_;
  Storage& storage_;
  // The transfer's memory, adjacent pages joined: at most nbytes / page_bytes + 2.
  std::vector<Segment> segments_;
};

}  // namespace fw::native
