// The memory that the current command's PRP entries name, and copies to and from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nvme/software/controller_context.h"
#include "nvme/software/prp_walk.h"
#include "storage/storage.h"

namespace fw::native {

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
  template <typename Move>
  void for_each_part(uint64_t offset, uint64_t nbytes, Move move) const;

  const ControllerContext& context_;
  Storage& storage_;
  std::vector<Segment> segments_;
};

}  // namespace fw::native
