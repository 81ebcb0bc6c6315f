// A byte range of a file or block device as a namespace.
//
// Direct mode reads and writes past the page cache and hides its alignment rules: reads are
// widened, pages that a write covers only in part go through the page cache instead. A page is
// therefore never written in part by one path while the other holds it dirty. A read-only file may
// name an existing mapping of itself, which then is the namespace's memory. A file that others cut
// short is not made longer again: writes beyond its end fail.
//
// A read-only file may be opened for both ways and change between them at any time: a transfer
// keeps the way that it began with, and a direct read first writes back what others hold dirty. A
// file that is written keeps its way. A page that a direct write has under way could else be
// brought into the page cache as it was before, and stay.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "storage/storage.h"

namespace fw::native {

class FileLock;
class PageCacheWindow;
class ReadCensus;

// Alignment that direct I/O on a file needs, or why it is not possible.
struct DirectAlignment {
  uint32_t memory = 0;
  uint32_t offset = 0;
  std::string error;  // empty when direct I/O works
};
DirectAlignment probe_direct_alignment(const std::string& path);

struct FileOptions {
  uint64_t offset = 0;
  uint64_t nbytes = 0;  // 0: to the end of the file
  bool writable = false;
  bool direct = false;
  uint64_t map_address = 0;   // of byte 0 of the file, or 0
  bool copies_cached = true;  // read what is in the page cache without system calls
  bool lock = false;          // exclude others, as FileLock has it
  std::string name = {};      // what messages call it; empty: its path
  bool may_change = false;    // open both ways, so that `choose_direct` can change it
};

class FileStorage final : public Storage {
 public:
  // Throws OpenError when the file cannot serve the options or its lock is taken,
  // invalid_argument when they conflict.
  static std::shared_ptr<FileStorage> open(const std::string& path, const FileOptions& options);
  ~FileStorage() override;

  std::byte* mapped_base() const override { return mapped_base_; }
  bool mapping_can_shrink() const override { return mapped_base_ != nullptr; }
  void refresh_backing(int64_t now_ns) override;
  int validate(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  bool writes_inline() const override { return !direct(); }
  bool resolve(const Request& request, PieceList& pieces) override;
  bool resolve_flush(PieceList& pieces) override;
  int flush(IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  void collect_files(std::vector<int>& files) const override;
  Description describe() const override;

  // Relaxed: either way reads the same bytes.
  bool direct() const { return direct_.load(std::memory_order_relaxed); }
  // Figures of the reads, or null for a file that keeps its way.
  ReadCensus* census() const { return census_.get(); }
  // Sends later reads past the page cache or through it. False: this file keeps its way.
  bool choose_direct(bool direct);
  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  int direct_fd() const { return direct_fd_; }
  uint64_t file_offset() const { return file_offset_; }

 private:
  struct Opened;
  explicit FileStorage(Opened&& opened);

  Piece piece(uint64_t offset, uint64_t n, uint32_t request_offset, bool through_cache) const;
  int read_direct(uint64_t file_offset, std::byte* data, size_t n);
  int write_range(uint64_t file_offset, const std::byte* data, size_t n);
  int zero_by_writing(uint64_t offset, uint64_t n, IoFailure* failure);
  int check_extent(uint64_t offset, uint64_t n);
  uint64_t look_at_size();
  int check_kept();
  void note_read(uint64_t offset, uint64_t n, bool waited) const;
  int fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const;

  const std::string path_;
  const int fd_;
  const int direct_fd_;
  const uint32_t alignment_;        // of direct reads
  const uint32_t write_alignment_;  // of direct writes: at least a page, see the file's promise
  const uint64_t file_offset_;
  const bool block_device_;
  const bool memory_file_system_;
  std::byte* const mapped_base_;
  std::atomic<bool> direct_;
  std::unique_ptr<ReadCensus> census_;
  std::unique_ptr<PageCacheWindow> window_;  // null: every read is a system call
  std::string window_refusal_;               // why there is none
  std::unique_ptr<FileLock> lock_;           // null: nobody asked for it
  std::atomic<bool> nowait_refused_{false};
  std::atomic<int64_t> refreshed_ns_{0};
  std::atomic<bool> written_{false};
};

// Blocking, complete transfers on a descriptor. Reads return ENODATA at the end of the file.
int read_fully(int fd, void* data, size_t n, uint64_t offset);
int write_fully(int fd, const void* data, size_t n, uint64_t offset);

}  // namespace fw::native
