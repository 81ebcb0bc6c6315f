// Finds the host memory that a command's PRP entries name, and checks bounds and alignment.
//
// The submitter is not trusted: every page, and every list of pages, must be inside memory that was
// registered for transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "flashwarp/nvme/command.cuh"

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

// Contiguous host memory of a transfer.
struct Segment {
  std::byte* address;
  uint64_t nbytes;
};

// Sets `segments` to the memory of a transfer of `nbytes`, adjacent pages joined: at most
// nbytes / page_bytes + 2. Returns an NVMe status.
uint16_t walk_prps(const nvme::command& entry, uint64_t nbytes, uint64_t page_bytes,
                   const DmaRegions& regions, std::vector<Segment>& segments);

}  // namespace fw::native
