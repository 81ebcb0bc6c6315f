// Reads bytes of a file that are in the page cache, from a mapping instead of by system calls.
//
// A system call that reads 4 KiB takes two to three times as long as the copy. The window copies
// only what is in the page cache. It refuses bytes that must be read from the disk, that the file
// no longer has, or that fail. The caller then makes the system call, which waits or returns the
// error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "flashwarp/base/platform.cuh"

namespace fw::native {

class PageCacheWindow {
 public:
  // A window on [offset, offset + nbytes) of an open file; `fd` must outlive it. Returns null and
  // sets `why` if that is not possible.
  static std::unique_ptr<PageCacheWindow> open(int fd, uint64_t offset, uint64_t nbytes,
                                               std::string& why);
  ~PageCacheWindow();
  PageCacheWindow(const PageCacheWindow&) = delete;
  PageCacheWindow& operator=(const PageCacheWindow&) = delete;

  // Copies `n` bytes at `offset` of the window. If it returns false, `target` is undefined, and the
  // caller has to read by system call.
  bool read(uint64_t offset, void* target, size_t n);

  // As `read` for each copy, and marks those that it made as done.
  void read_each(base::host_copy* copies, uint32_t count);

  // Whether bytes are in the page cache, as far as a look that may be a second old says.
  bool has(uint64_t offset, size_t n);

  // Residency is looked up for this much at a time. It costs 2 us of kernel time, or 1 ms for a
  // GiB; a few more where pages are missing.
  static constexpr uint64_t kChunkBytes = 2 << 20;
  // The smallest page of any machine, which gives the most flags of a chunk.
  static constexpr uint64_t kSystemPageBytesMin = 4096;

 private:
  // What the last look at a chunk found.
  struct Seen {
    std::atomic<uint32_t> second;
    std::atomic<bool> whole;
    std::atomic<uint64_t> pages[kChunkBytes / kSystemPageBytesMin / 64];  // unless it is whole
    bool has(uint64_t begin, uint64_t end) const;
  };
  struct Free {
    void operator()(void* memory) const;
  };

  PageCacheWindow(int fd, uint64_t offset, uint64_t nbytes, std::byte* map, uint64_t map_offset,
                  Seen* seen);

  // Copies for which one check of the file's size is enough.
  static constexpr uint32_t kGroupMax = 32;

  void read_group(base::host_copy* copies, uint32_t count, int64_t now_ns);
  bool guard_holds(int64_t now_ns);
  bool is_resident(uint64_t begin, uint64_t end, int64_t now_ns);
  void look(uint64_t begin, uint64_t end, Seen& seen) const;

  const int fd_;
  const uint64_t file_begin_;
  const uint64_t file_end_;
  std::byte* const map_;
  const uint64_t map_offset_;  // of the map's first byte in the file
  // Of each chunk; `second` counts from 1. From calloc, so for a very large file only the part in
  // use costs memory.
  std::unique_ptr<Seen[], Free> seen_;
  std::atomic<int64_t> guard_checked_ns_{0};
  std::atomic<bool> guard_holds_{true};
};

}  // namespace fw::native
