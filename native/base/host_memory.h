// Aligned, zero-filled host memory; residency of mappings and files; replacement of mappings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

// Zero-filled memory at a multiple of `alignment` (a power of two), freed with the object. Users of
// the memory hold the object, so in any order of endings it outlives running code. Pages are
// allocated at their first access, and large blocks ask for huge pages.
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

// The fraction of the pages of [address, address + nbytes) in memory; -errno on failure.
double residency(uint64_t address, uint64_t nbytes);

// How many pages of bytes [offset, offset + nbytes) of an open file are in the page cache; -errno
// on failure, which is ENOSYS before Linux 6.5. It looks at the page cache alone: `residency` of a
// mapping takes several times as long. nbytes 0: to the end of the file.
int64_t cached_pages(int fd, uint64_t offset, uint64_t nbytes);

// Replaces the mapping at [address, address + nbytes) by read-only zero pages, in one step for all
// threads that read there. Returns 0 or an errno value.
int replace_mapping(uint64_t address, uint64_t nbytes);

}  // namespace fw::native
