// A file's bytes in the page cache, copied from a mapping instead of by system calls.
//
// A read of 4 KiB by system call costs two to three times its copy. The window copies what is in
// the page cache now, and says no to anything else: bytes that must be read from the disk, that the
// file no longer has, or that fail. The caller then asks by system call, which waits or knows why.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace fw::native {

class PageCacheWindow {
 public:
  // Over [offset, offset + nbytes) of an open file; `fd` must outlive the window. Null when this
  // cannot be done here, and `why` says why.
  static std::unique_ptr<PageCacheWindow> open(int fd, uint64_t offset, uint64_t nbytes,
                                               std::string& why);
  ~PageCacheWindow();
  PageCacheWindow(const PageCacheWindow&) = delete;
  PageCacheWindow& operator=(const PageCacheWindow&) = delete;

  // Copies `n` bytes at `offset` of the window. False: ask by system call; `target` holds anything.
  bool read(uint64_t offset, void* target, size_t n);

 private:
  using Seen = std::atomic<uint32_t>;
  struct Free {
    void operator()(void* memory) const;
  };

  PageCacheWindow(int fd, uint64_t offset, uint64_t nbytes, std::byte* map, uint64_t map_offset,
                  Seen* seen);

  bool guard_holds(int64_t now_ns);
  bool is_resident(uint64_t begin, uint64_t end, int64_t now_ns);
  bool look(uint64_t begin, uint64_t end) const;

  const int fd_;
  const uint64_t file_begin_;
  const uint64_t file_end_;
  std::byte* const map_;
  const uint64_t map_offset_;  // of the map's first byte in the file
  // Second, counted from 1, in which a chunk was last found whole in the page cache; 0: never.
  // Allocated with calloc: of a very large file only the part in use costs memory.
  std::unique_ptr<Seen[], Free> seen_;
  std::atomic<int64_t> guard_checked_ns_{0};
  std::atomic<bool> guard_holds_{true};
};

}  // namespace fw::native
