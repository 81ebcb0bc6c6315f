// The reader and writer of files by blocking calls: all bytes, through the page cache or past it.
//
// Past the page cache there are no alignment rules for the caller: reads are widened, and a block
// of which a write has a part is read, changed and written by one owner (block_locks.h). Only the
// last bytes of a file that ends inside of a block go through the page cache, and they are written
// back before another write beside them begins. So Linux finds no page that it cannot drop, which
// it would report as an EIO of the whole file.
//
// Any number of threads may call. Results are 0 or an errno value.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "storage/block_locks.h"

namespace fw::native {

// The alignment that direct I/O on a file needs, or why it is not possible.
struct DirectAlignment {
  uint32_t memory = 0;
  uint32_t offset = 0;
  uint32_t write = 0;  // of offset and length of writes
  std::string error;   // empty when direct I/O works
};
DirectAlignment probe_direct_alignment(const std::string& path);
DirectAlignment alignment_of(int direct_fd);

// Transfers of all bytes on one descriptor, which are repeated when they end early or are
// interrupted. Reads return ENODATA at the end of the file. `moved` counts the bytes there, too.
int read_fully(int fd, void* data, size_t n, uint64_t offset, size_t* moved = nullptr);
int write_fully(int fd, const void* data, size_t n, uint64_t offset, size_t* moved = nullptr);

// Memory of this thread that begins on a page, through which unaligned transfers pass; null if the
// host has none.
inline constexpr size_t kScratchBytes = 1 << 20;
std::byte* thread_scratch();

// One file, whose descriptors are the caller's.
class FileIo {
 public:
  struct Direct {
    int fd = -1;
    uint32_t alignment = 1;        // of memory, offset and length of reads
    uint32_t write_alignment = 1;  // of those of writes
    std::shared_ptr<BlockLocks> blocks;
  };

  FileIo(int fd, Direct direct, uint64_t nbytes)
      : fd_(fd), direct_(std::move(direct)), file_end_(nbytes) {}

  int fd() const { return fd_; }
  int direct_fd() const { return direct_.fd; }
  uint32_t alignment() const { return direct_.alignment; }
  uint32_t write_alignment() const { return direct_.write_alignment; }

  int read(bool direct, uint64_t offset, void* data, size_t n) const;
  int write(bool direct, uint64_t offset, const void* data, size_t n) const;
  // As fallocate(2), while no part of a block there is being written back. The size stays.
  int deallocate(int mode, uint64_t offset, uint64_t n) const;

  // How a direct write of [from, from + n) begins: up to the next part that is written another way.
  BlockClaim claim_of(uint64_t from, uint64_t n) const;
  // Where the file ended at the last look.
  void note_end(uint64_t nbytes) { file_end_.store(nbytes, std::memory_order_relaxed); }

 private:
  class Holding;
  int read_direct(uint64_t offset, std::byte* data, size_t n) const;
  int write_claimed(const BlockClaim& claim, const std::byte* data) const;
  int write_part(uint64_t offset, const std::byte* data, size_t n) const;

  const int fd_;
  const Direct direct_;
  std::atomic<uint64_t> file_end_;
};

}  // namespace fw::native
