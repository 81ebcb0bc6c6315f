// The two ways in which Linux gives a process a device and maps its memory for it.
//
// `Type1`: the device's group in a container, on any kernel with VFIO. `Iommufd`: the device by
// itself, on newer ones. Not thread-safe; vfio_function.h has the lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "vfio/file.h"
#include "vfio/iova_space.h"

namespace fw::native::vfio {

class Iommu {
 public:
  virtual ~Iommu() = default;

  // The descriptor of the device, owned by this object.
  int device() const { return device_.get(); }
  virtual const char* kind() const = 0;
  virtual std::vector<IovaRange> ranges() const = 0;
  // Returns 0 or an errno value.
  virtual int map(uint64_t iova, uint64_t address, uint64_t nbytes) = 0;
  // Maps the first bytes of a file of memory: a memfd, or another device's dma-buf.
  virtual int map_file(uint64_t iova, int file, uint64_t nbytes) = 0;
  virtual int unmap(uint64_t iova, uint64_t nbytes) = 0;
  // The open groups that a reset of the slot must name.
  virtual std::vector<int32_t> groups() const { return {}; }

 protected:
  OpenFile device_;
};

// Throw DriveError: no permission, no IOMMU, not bound to vfio-pci, in use by another process.
std::unique_ptr<Iommu> open_type1(const std::string& bdf, const std::string& group);
std::unique_ptr<Iommu> open_iommufd(const std::string& bdf, const std::string& device);

// Whether this kernel's iommufd maps a file of memory, tried in an address space that no device
// has: 0 or an errno value.
int try_iommufd(int file, uint64_t nbytes);

}  // namespace fw::native::vfio
