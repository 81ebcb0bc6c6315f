// Residency, truncation and the mapping; see page_cache_window.h.
#include "storage/page_cache_window.h"

#include <sys/mman.h>
#include <sys/stat.h>
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
#include "base/host_memory.h"

namespace fw::native {
namespace {

constexpr uint64_t kChunkBytes = PageCacheWindow::kChunkBytes;
constexpr uint64_t kSystemPageBytesMin = PageCacheWindow::kSystemPageBytesMin;
constexpr uint64_t kPagesMax = kChunkBytes / kSystemPageBytesMin;

// How long a look is valid. Memory pressure takes seconds to empty a page cache in use. A page that
// was evicted since the look is read by a fault, which is correct, but the thread cannot serve the
// queue pair meanwhile.
constexpr int64_t kLookValidNs = 1'000'000'000;

constexpr int64_t kGuardCheckNs = 1'000'000;

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

// Loads the first bytes of a copy to come. The processor fetches the rest by itself.
void fetch(const std::byte* from, uint64_t n) {
  constexpr uint64_t kFetchBytes = 64;
  constexpr uint64_t kMemoryLine = 64;
  for (uint64_t i = 0; i < n && i < kFetchBytes; i += kMemoryLine) __builtin_prefetch(from + i);
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
  base::host_copy copy = {offset, reinterpret_cast<uint64_t>(target), n, false};
  read_each(&copy, 1);
  return copy.done;
}

void PageCacheWindow::read_each(base::host_copy* copies, uint32_t count) {
  const int64_t now = coarse_ns();
  if (!guard_holds(now)) return;
  for (; count != 0; copies += std::min(count, kGroupMax), count -= std::min(count, kGroupMax)) {
    read_group(copies, std::min(count, kGroupMax), now);
  }
}

void PageCacheWindow::read_group(base::host_copy* copies, uint32_t count, int64_t now_ns) {
  std::array<GuardedCopy, kGroupMax> guarded;
  std::array<base::host_copy*, kGroupMax> whose;
  uint32_t found = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t begin = file_begin_ + copies[i].offset;
    const uint64_t end = begin + (copies[i].count - 1) * copies[i].stride + copies[i].bytes;
    if (copies[i].bytes == 0 || end > file_end_ || !is_resident(begin, end, now_ns)) continue;
    const std::byte* source = map_ + (begin - map_offset_);
    fetch(source, copies[i].bytes);
    whose[found] = &copies[i];
    guarded[found++] = {reinterpret_cast<void*>(copies[i].target),
                        source,
                        copies[i].bytes,
                        {},
                        copies[i].count,
                        copies[i].stride};
  }
  guarded_copy(guarded.data(), found);
  uint64_t end_of_zeros = 0;
  for (uint32_t i = 0; i < found; ++i) {
    if (guarded[i].result != CopyResult::kEndsWithZero) continue;
    const base::host_copy& made = *whose[i];
    end_of_zeros =
        std::max(end_of_zeros, made.offset + (made.count - 1) * made.stride + made.bytes);
  }
  // Behind the end of a truncated file, the rest of its last page reads as zeros.
  const bool whole = end_of_zeros == 0 || has_size(fd_, file_begin_ + end_of_zeros);
  for (uint32_t i = 0; i < found; ++i) {
    whose[i]->done = guarded[i].result == CopyResult::kCopied ||
                     (guarded[i].result == CopyResult::kEndsWithZero && whole);
  }
}

bool PageCacheWindow::has(uint64_t offset, size_t n) {
  const uint64_t begin = file_begin_ + offset;
  return begin + n <= file_end_ && is_resident(begin, begin + n, coarse_ns());
}

bool PageCacheWindow::guard_holds(int64_t now_ns) {
  // Relaxed: two threads may look at once.
  if (now_ns - guard_checked_ns_.load(std::memory_order_relaxed) >= kGuardCheckNs) {
    guard_checked_ns_.store(now_ns, std::memory_order_relaxed);
    guard_holds_.store(fault_guard_holds(), std::memory_order_relaxed);
  }
  return guard_holds_.load(std::memory_order_relaxed);
}

// Whether all pages of [begin, end) of the file were in the page cache at the last look.
bool PageCacheWindow::is_resident(uint64_t begin, uint64_t end, int64_t now_ns) {
  const uint32_t second = uint32_t(now_ns / kLookValidNs) + 1;
  while (begin < end) {
    const uint64_t chunk = round_down(begin, kChunkBytes);
    const uint64_t stop = std::min(end, chunk + kChunkBytes);
    Seen& seen = seen_[(chunk - map_offset_) / kChunkBytes];
    // Acquire: a thread that sees the time of a look sees its result, or a newer one.
    if (seen.second.load(std::memory_order_acquire) != second) {
      look(chunk, std::min(file_end_, chunk + kChunkBytes), seen);
      seen.second.store(second, std::memory_order_release);
    }
    if (!seen.has(begin - chunk, stop - chunk)) return false;
    begin = stop;
  }
  return true;
}

bool PageCacheWindow::Seen::has(uint64_t begin, uint64_t end) const {
  // Relaxed: the flags order no other memory.
  if (whole.load(std::memory_order_relaxed)) return true;
  for (uint64_t page = begin / kSystemPageBytesMin; page * kSystemPageBytesMin < end; ++page) {
    const uint64_t word = pages[page / 64].load(std::memory_order_relaxed);
    if (((word >> (page % 64)) & 1) == 0) return false;
  }
  return true;
}

// Looks at the pages of a chunk.
void PageCacheWindow::look(uint64_t begin, uint64_t end, Seen& seen) const {
  static const uint64_t page_bytes = uint64_t(sysconf(_SC_PAGESIZE));
  const uint64_t count = round_up(end - begin, page_bytes) / page_bytes;
  const int64_t cached = cached_pages(fd_, begin, count * page_bytes);
  const bool counted = cached >= 0;
  const bool whole = cached == int64_t(count);
  seen.whole.store(whole, std::memory_order_relaxed);
  if (whole) return;
  for (std::atomic<uint64_t>& word : seen.pages) word.store(0, std::memory_order_relaxed);
  if (!counted && cached != -ENOSYS) return;
  std::array<unsigned char, kPagesMax> flags;
  if (mincore(map_ + (begin - map_offset_), count * page_bytes, flags.data()) != 0) return;
  const auto is_cached = [](unsigned char flag) { return (flag & 1) != 0; };
  // To a process that may not write the file, mincore says that it has all pages.
  const bool all = std::all_of(flags.begin(), flags.begin() + count, is_cached);
  if (all && counted) return;
  for (uint64_t i = 0; i < count * page_bytes / kSystemPageBytesMin; ++i) {
    if (!is_cached(flags[i * kSystemPageBytesMin / page_bytes])) continue;
    seen.pages[i / 64].fetch_or(uint64_t(1) << (i % 64), std::memory_order_relaxed);
  }
}

}  // namespace fw::native
