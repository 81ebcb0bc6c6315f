// Aligned, zero-filled host memory, and what is resident of a mapping.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

// Zero-filled memory at a multiple of `alignment` (a power of two), given back with the object.
// Whoever uses the memory holds the object, so no order of endings takes it away under running
// code. Pages come when they are touched; large blocks ask for huge pages.
class HostMemory {
 public:
  // Throws std::bad_alloc, or invalid_argument for an alignment that is no power of two.
  HostMemory(size_t nbytes, size_t alignment);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void* address() const { return address_; }
  size_t nbytes() const { return nbytes_; }

 private:
  void* address_;
  const size_t nbytes_;
  size_t mapped_nbytes_;
};

// The part of the pages of [address, address + nbytes) that are in memory, 0 to 1; -errno on
// failure.
double residency(uint64_t address, uint64_t nbytes);

// Puts zero pages, which are only read, in the place of the mapping at [address, address + nbytes):
// at once for every thread that reads there. 0, or an errno value.
int replace_mapping(uint64_t address, uint64_t nbytes);

}  // namespace fw::native
