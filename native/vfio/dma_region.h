// Memory that a drive may reach, until the object's end; and the PRP entries of its pages.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/host_memory.h"
#include "flashwarp/nvme/drive_addressing.cuh"
#include "vfio/pci_function.h"

namespace fw::native::vfio {

// CC.MPS of the driver, and what the host's pages are a multiple of.
inline constexpr uint64_t kMemoryPageBytes = 4096;

// Memory that the process's page tables name, and no file.
inline constexpr int kNoFile = -1;

// The pages that hold [address, address + nbytes). Their owner keeps them as long as this object.
// A GPU's are the first ones of `file`, a dma-buf, which may be closed behind the constructor.
class DmaRegion {
 public:
  DmaRegion(std::shared_ptr<PciFunction> function, uint64_t address, uint64_t nbytes,
            int file = kNoFile);
  ~DmaRegion();
  DmaRegion(const DmaRegion&) = delete;
  DmaRegion& operator=(const DmaRegion&) = delete;

  // The first page.
  uint64_t begin() const { return begin_; }
  uint64_t nbytes() const { return nbytes_; }
  uint64_t iova() const { return iova_; }
  uint64_t iova_of(uint64_t address) const { return iova_ + (address - begin_); }

 private:
  const std::shared_ptr<PciFunction> function_;
  const uint64_t begin_;
  const uint64_t nbytes_;
  const uint64_t iova_;
  ForkGuard fork_guard_;
};

// Memory of the library's own that a drive may reach.
class DmaMemory {
 public:
  DmaMemory(std::shared_ptr<PciFunction> function, uint64_t nbytes)
      : memory_(nbytes, kMemoryPageBytes),
        region_(std::move(function), reinterpret_cast<uint64_t>(memory_.address()), nbytes) {}

  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.address());
  }
  uint64_t iova() const { return region_.iova(); }
  const DmaRegion& region() const { return region_; }

 private:
  HostMemory memory_;
  DmaRegion region_;
};

// Data of transfers, with a table of PRP entries if a transfer may take more than two pages: entry
// i names page i + 1, as `nvme::drive_addressing` has it.
class DataRegion {
 public:
  DataRegion(std::shared_ptr<PciFunction> function, uint64_t address, uint64_t nbytes,
             uint64_t transfer_bytes_max, int file = kNoFile);

  nvme::drive_addressing addressing(uint32_t nsid, uint32_t lba_shift) const;

 private:
  DmaRegion data_;
  std::optional<DmaMemory> lists_;
};

}  // namespace fw::native::vfio
