// Aligned, zero-filled host memory; residency of mappings and files; replacement of mappings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

inline constexpr size_t kHugePageBytes = size_t(2) << 20;

// Zero-filled memory at a multiple of `alignment` (a power of two), freed with the object. Users of
// the memory hold the object, so in any order of endings it outlives running code. Pages are
// allocated at their first access, and large blocks ask for huge pages.
class HostMemory {
 public:
  // Throws std::bad_alloc, or invalid_argument for an alignment that is no power of two.
  HostMemory(size_t nbytes, size_t alignment);
  // The beginning of a file that processes map, such as a memfd, for reading and perhaps writing.
  // Throws std::system_error if it cannot be mapped so.
  HostMemory(size_t nbytes, size_t alignment, int fd, bool writable);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void* address() const { return address_; }
  size_t nbytes() const { return nbytes_; }
  // Leaves the memory out of children of fork().
  void keep_from_children() const;
  // Takes a huge page for the bytes from `begin`, a multiple of its size, also if Linux gives such
  // memory small pages. Returns 0, or an errno value: EINVAL before Linux 6.1.
  int take_huge_page(size_t begin) const;

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
