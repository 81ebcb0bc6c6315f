// Anonymous mappings; see host_memory.h.
#include "base/host_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "base/alignment.h"
#include "base/require.h"

namespace fw::native {
namespace {

// mincore() reports one byte for each page; it is called for this many pages at a time.
constexpr size_t kMincorePages = 64 * 1024;

// madvise(2), from Linux 6.1 on; older headers do not declare it.
constexpr int kCollapse = 25;

// cachestat(2); older headers do not declare it.
constexpr long kCachestat = 451;
struct CachestatRange {
  uint64_t offset, nbytes;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

size_t page_bytes() {
  static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

HostMemory::HostMemory(size_t nbytes, size_t alignment) : nbytes_(nbytes) {
  if (!std::has_single_bit(alignment)) {
    throw std::invalid_argument("alignment must be a power of two");
  }
  alignment = std::max(alignment, page_bytes());
  if (nbytes > SIZE_MAX / 2 || alignment > SIZE_MAX / 4) throw std::bad_alloc();
  mapped_nbytes_ = round_up(std::max<size_t>(nbytes, 1), page_bytes());
  // Map more than is needed, then unmap the ends that alignment leaves over.
  const size_t all = mapped_nbytes_ + alignment - page_bytes();
  void* memory = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t aligned = round_up(start, alignment);
  const size_t head = aligned - start;
  const size_t tail = all - head - mapped_nbytes_;
  if (head != 0) munmap(memory, head);
  if (tail != 0) munmap(reinterpret_cast<void*>(aligned + mapped_nbytes_), tail);
  address_ = reinterpret_cast<void*>(aligned);
  // With 4 KiB pages, nearly every access to random lines of a large cache would miss the TLB.
  if (mapped_nbytes_ >= kHugePageBytes) madvise(address_, mapped_nbytes_, MADV_HUGEPAGE);
}

HostMemory::HostMemory(size_t nbytes, size_t alignment, int fd, bool writable)
    : HostMemory(nbytes, alignment) {
  const int access = PROT_READ | (writable ? PROT_WRITE : 0);
  if (mmap(address_, mapped_nbytes_, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category());
  }
  if (mapped_nbytes_ >= kHugePageBytes) madvise(address_, mapped_nbytes_, MADV_HUGEPAGE);
}

void HostMemory::keep_from_children() const { madvise(address_, mapped_nbytes_, MADV_DONTFORK); }

int HostMemory::take_huge_page(size_t begin) const {
  require(begin <= mapped_nbytes_ && mapped_nbytes_ - begin >= kHugePageBytes, "out of bounds");
  char* const page = static_cast<char*>(address_) + begin;
  // There must be a page to begin with.
  static_cast<void>(*static_cast<volatile char*>(page));
  return madvise(page, kHugePageBytes, kCollapse) == 0 ? 0 : errno;
}

HostMemory::~HostMemory() { munmap(address_, mapped_nbytes_); }

double residency(uint64_t address, uint64_t nbytes) {
  const uint64_t start = round_down(address, page_bytes());
  const uint64_t pages = (address + nbytes - start + page_bytes() - 1) / page_bytes();
  if (nbytes == 0) return 1.0;
  std::vector<unsigned char> flags(std::min<uint64_t>(pages, kMincorePages));
  uint64_t resident = 0;
  for (uint64_t page = 0; page < pages; page += flags.size()) {
    const uint64_t count = std::min<uint64_t>(flags.size(), pages - page);
    auto* from = reinterpret_cast<void*>(start + page * page_bytes());
    if (mincore(from, count * page_bytes(), flags.data()) != 0) return -double(errno);
    resident += uint64_t(std::count_if(flags.begin(), flags.begin() + int64_t(count),
                                       [](unsigned char flag) { return (flag & 1) != 0; }));
  }
  return double(resident) / double(pages);
}

int64_t cached_pages(int fd, uint64_t offset, uint64_t nbytes) {
  CachestatRange range = {offset, nbytes};
  Cachestat found = {};
  return syscall(kCachestat, fd, &range, &found, 0) == 0 ? int64_t(found.cached) : -int64_t(errno);
}

int replace_mapping(uint64_t address, uint64_t nbytes) {
  void* const there = reinterpret_cast<void*>(address);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  const size_t size = round_up(nbytes, page_bytes());
  return mmap(there, size, PROT_READ, flags, -1, 0) == MAP_FAILED ? errno : 0;
}

}  // namespace fw::native
