// PRP entries and lists (NVM Express Base Specification 2.0, section 4.1.1); see prp_walk.h.
#include "nvme/software/prp_walk.h"

#include <algorithm>

namespace fw::native {
namespace {

// PRP addresses are dword aligned, list pointers qword aligned.
constexpr uint64_t kAddressMask = 3;
constexpr uint64_t kListMask = 7;

uint16_t append(uint64_t address, uint64_t nbytes, const DmaRegions& regions,
                std::vector<Segment>& segments) {
  if (!regions.contains(address, nbytes)) return nvme::kDataTransferError;
  auto* start = reinterpret_cast<std::byte*>(address);
  if (!segments.empty() && segments.back().address + segments.back().nbytes == start) {
    segments.back().nbytes += nbytes;
  } else {
    segments.push_back({start, nbytes});
  }
  return nvme::kSuccess;
}

// Walks a list from `list` to the end of its page. If more pages remain, its last entry points to
// the next list. This ends, because each entry except that link takes a page of the transfer, and
// each list but the first begins at a page and so has more than the link.
uint16_t walk_list(uint64_t list, uint64_t remaining, uint64_t page_bytes,
                   const DmaRegions& regions, std::vector<Segment>& segments) {
  if ((list & kListMask) != 0) return nvme::kPrpOffsetInvalid;
  while (remaining != 0) {
    const uint64_t entries = (page_bytes - (list & (page_bytes - 1))) / sizeof(uint64_t);
    const uint64_t pages = (remaining + page_bytes - 1) / page_bytes;
    const uint64_t used = std::min(entries, pages);
    if (!regions.contains(list, used * sizeof(uint64_t))) return nvme::kDataTransferError;
    const auto* entry = reinterpret_cast<const uint64_t*>(list);
    const uint64_t data_entries = pages > entries ? entries - 1 : pages;
    for (uint64_t i = 0; i < data_entries; ++i) {
      const uint64_t address = entry[i];
      if ((address & (page_bytes - 1)) != 0) return nvme::kPrpOffsetInvalid;
      const uint64_t step = std::min(remaining, page_bytes);
      if (uint16_t status = append(address, step, regions, segments)) return status;
      remaining -= step;
    }
    if (remaining == 0) break;
    list = entry[entries - 1];
    if ((list & (page_bytes - 1)) != 0) return nvme::kPrpOffsetInvalid;
  }
  return nvme::kSuccess;
}

}  // namespace

uint16_t walk_prps(const nvme::command& entry, uint64_t nbytes, uint64_t page_bytes,
                   const DmaRegions& regions, std::vector<Segment>& segments) {
  segments.clear();
  if ((entry.prp1 & kAddressMask) != 0) return nvme::kPrpOffsetInvalid;
  const uint64_t first = std::min(nbytes, page_bytes - (entry.prp1 & (page_bytes - 1)));
  if (uint16_t status = append(entry.prp1, first, regions, segments)) return status;
  const uint64_t remaining = nbytes - first;
  if (remaining == 0) return nvme::kSuccess;
  if (remaining > page_bytes)
    return walk_list(entry.prp2, remaining, page_bytes, regions, segments);
  if ((entry.prp2 & (page_bytes - 1)) != 0) return nvme::kPrpOffsetInvalid;
  return append(entry.prp2, remaining, regions, segments);
}

}  // namespace fw::native
