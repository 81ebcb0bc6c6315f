// Mapping and PRP tables; see dma_region.h.
#include "vfio/dma_region.h"

#include "base/alignment.h"

namespace fw::native::vfio {

DmaRegion::DmaRegion(std::shared_ptr<PciFunction> function, uint64_t address, uint64_t nbytes,
                     int file)
    : function_(std::move(function)),
      begin_(round_down(address, kMemoryPageBytes)),
      nbytes_(round_up(address + nbytes, kMemoryPageBytes) - begin_),
      iova_(file == kNoFile ? function_->map(begin_, nbytes_)
                            : function_->map_file(file, nbytes_)) {}

DmaRegion::~DmaRegion() {
  // The mapping is the parent's, which goes on using it.
  if (!fork_guard_.in_child()) function_->unmap(iova_, nbytes_);
}

DataRegion::DataRegion(std::shared_ptr<PciFunction> function, uint64_t address, uint64_t nbytes,
                       uint64_t transfer_bytes_max, int file)
    : data_(function, address, nbytes, file) {
  if (transfer_bytes_max <= 2 * kMemoryPageBytes) return;
  const uint64_t pages = data_.nbytes() / kMemoryPageBytes;
  lists_.emplace(std::move(function), pages * sizeof(uint64_t));
  auto* entries = lists_->as<uint64_t>();
  for (uint64_t i = 0; i < pages; ++i) entries[i] = data_.iova() + (i + 1) * kMemoryPageBytes;
}

nvme::drive_addressing DataRegion::addressing(uint32_t nsid, uint32_t lba_shift) const {
  nvme::drive_addressing d = {};
  d.begin = data_.begin();
  d.iova_offset = data_.iova() - data_.begin();
  d.lists = lists_ ? lists_->iova() : 0;
  d.page_bytes = uint32_t(kMemoryPageBytes);
  d.nsid = nsid;
  d.lba_shift = lba_shift;
  return d;
}

}  // namespace fw::native::vfio
