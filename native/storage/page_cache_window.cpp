// Residency, truncation and the mapping; see page_cache_window.h.
#include "storage/page_cache_window.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "base/alignment.h"
#include "base/fault_guard.h"

namespace fw::native {
namespace {

// The smallest page of any machine, which gives the most flags of a chunk.
constexpr uint64_t kSystemPageBytesMin = 4096;

// Residency is looked up for this much at a time. It costs 2 us of kernel time, or 1 ms for a GiB.
constexpr uint64_t kChunkBytes = 2 << 20;

// How long a look is valid. Memory pressure takes seconds to empty a page cache in use. A page that
// was evicted since the look is read by a fault, which is correct, but the thread cannot serve the
// queue pair meanwhile.
constexpr int64_t kLookValidNs = 1'000'000'000;

constexpr int64_t kGuardCheckNs = 1'000'000;

// cachestat(2), since Linux 6.5; older headers do not declare it.
constexpr long kCachestat = 451;
struct CachestatRange {
  uint64_t offset, nbytes;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

// File systems on which mappings and reads use the same pages, which are always up to date. Network
// file systems, for example, check for changes by other machines at a read, but not at an access to
// a mapped page.
constexpr std::array<long, 7> kLocalFileSystems = {
    0xEF53,      // ext2, ext3, ext4
    0x58465342,  // XFS
    0x9123683E,  // Btrfs
    0xF2F52010,  // F2FS
    0x01021994,  // tmpfs
    0x858458F6,  // ramfs
    0x794C7630,  // overlayfs, through the descriptor that was opened
};

bool is_local(int fd) {
  struct statfs information;
  if (fstatfs(fd, &information) != 0) return false;
  const long type = long(uint32_t(information.f_type));
  return std::find(kLocalFileSystems.begin(), kLocalFileSystems.end(), type) !=
         kLocalFileSystems.end();
}

// Accurate to a few milliseconds, for a fifth of the cost of the exact clock.
int64_t coarse_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

bool has_size(int fd, uint64_t nbytes) {
  struct stat information;
  return fstat(fd, &information) == 0 && uint64_t(information.st_size) >= nbytes;
}

}  // namespace

std::unique_ptr<PageCacheWindow> PageCacheWindow::open(int fd, uint64_t offset, uint64_t nbytes,
                                                       std::string& why) {
  const auto refuse = [&](std::string reason) {
    why = std::move(reason);
    return nullptr;
  };
  struct stat information;
  if (nbytes == 0 || fstat(fd, &information) != 0 || !S_ISREG(information.st_mode)) {
    return refuse("not a regular file");
  }
  if (!is_local(fd)) return refuse("not a local file system");
  if (!install_fault_guard()) return refuse("SIGBUS cannot be handled");
  const uint64_t map_offset = round_down(offset, kChunkBytes);
  const uint64_t length = offset + nbytes - map_offset;
  const uint64_t chunks = (length + kChunkBytes - 1) / kChunkBytes;
  auto* seen = static_cast<Seen*>(std::calloc(chunks, sizeof(Seen)));
  if (seen == nullptr) return refuse("out of memory");
  void* map = mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, off_t(map_offset));
  if (map == MAP_FAILED) {
    const int error = errno;
    std::free(seen);
    return refuse(std::string("mmap: ") + std::strerror(error));
  }
  auto* start = static_cast<std::byte*>(map);
  return std::unique_ptr<PageCacheWindow>(
      new PageCacheWindow(fd, offset, nbytes, start, map_offset, seen));
}

PageCacheWindow::PageCacheWindow(int fd, uint64_t offset, uint64_t nbytes, std::byte* map,
                                 uint64_t map_offset, Seen* seen)
    : fd_(fd),
      file_begin_(offset),
      file_end_(offset + nbytes),
      map_(map),
      map_offset_(map_offset),
      seen_(seen) {}

void PageCacheWindow::Free::operator()(void* memory) const { std::free(memory); }

PageCacheWindow::~PageCacheWindow() { munmap(map_, file_end_ - map_offset_); }

bool PageCacheWindow::read(uint64_t offset, void* target, size_t n) {
  if (n == 0) return true;
  const int64_t now = coarse_ns();
  const uint64_t begin = file_begin_ + offset;
  const uint64_t end = begin + n;
  if (!guard_holds(now) || !is_resident(begin, end, now)) return false;
  const CopyResult result = guarded_copy(target, map_ + (begin - map_offset_), n);
  // Behind the end of a truncated file, the rest of its last page reads as zeros.
  return result == CopyResult::kCopied ||
         (result == CopyResult::kEndsWithZero && has_size(fd_, end));
}

bool PageCacheWindow::guard_holds(int64_t now_ns) {
  // Relaxed: two threads may look at once.
  if (now_ns - guard_checked_ns_.load(std::memory_order_relaxed) >= kGuardCheckNs) {
    guard_checked_ns_.store(now_ns, std::memory_order_relaxed);
    guard_holds_.store(fault_guard_holds(), std::memory_order_relaxed);
  }
  return guard_holds_.load(std::memory_order_relaxed);
}

bool PageCacheWindow::is_resident(uint64_t begin, uint64_t end, int64_t now_ns) {
  const uint32_t second = uint32_t(now_ns / kLookValidNs) + 1;
  while (begin < end) {
    const uint64_t chunk = round_down(begin, kChunkBytes);
    const uint64_t chunk_end = chunk + kChunkBytes;
    const uint64_t stop = std::min(end, chunk_end);
    // Relaxed: the mark orders no other memory.
    Seen& seen = seen_[(chunk - map_offset_) / kChunkBytes];
    if (seen.load(std::memory_order_relaxed) != second) {
      if (look(chunk, std::min(file_end_, chunk_end))) {
        seen.store(second, std::memory_order_relaxed);
      } else if (!look(begin, stop)) {
        return false;
      }
    }
    begin = stop;
  }
  return true;
}

// Whether all pages of a range of the file are in the page cache.
bool PageCacheWindow::look(uint64_t begin, uint64_t end) const {
  static const uint64_t page_bytes = uint64_t(sysconf(_SC_PAGESIZE));
  begin = round_down(begin, page_bytes);
  const uint64_t pages = round_up(end - begin, page_bytes) / page_bytes;
  CachestatRange range = {begin, pages * page_bytes};
  Cachestat found;
  if (syscall(kCachestat, fd_, &range, &found, 0) == 0) return found.cached == pages;
  if (errno != ENOSYS) return false;
  std::array<unsigned char, kChunkBytes / kSystemPageBytesMin> flags;
  return mincore(map_ + (begin - map_offset_), pages * page_bytes, flags.data()) == 0 &&
         std::all_of(flags.begin(), flags.begin() + pages,
                     [](unsigned char flag) { return (flag & 1) != 0; });
}

}  // namespace fw::native
