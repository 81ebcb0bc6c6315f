// A byte range of a file or block device as a namespace.
//
// With O_DIRECT, transfers bypass the page cache without alignment rules for the caller
// (file_io.h). For a read-only file, the caller may pass an existing mapping, which then is the
// namespace's memory. If another process truncates the file, writes beyond its end fail; they do
// not extend it again.
//
// A read-only file may be opened for both paths and switch between them at any time. A transfer
// stays on the path on which it began. Before a direct read, the kernel writes dirty pages back. A
// writable file never switches: the page cache could otherwise load a page while a direct write to
// it is under way, and keep the old bytes.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "storage/file_io.h"
#include "storage/storage.h"

namespace fw::native {

class FileLock;
class PageCacheWindow;
class ReadCensus;

struct FileOptions {
  uint64_t offset = 0;
  uint64_t nbytes = 0;  // 0: to the end of the file
  bool writable = false;
  bool direct = false;
  uint64_t map_address = 0;   // of byte 0 of the file, or 0
  bool copies_cached = true;  // read what is in the page cache without system calls
  bool lock = false;          // exclude other users by a FileLock
  std::string name = {};      // for messages; empty: the path
  bool may_change = false;    // open for both paths, so that `choose_direct` can switch
};

class FileStorage final : public Storage {
 public:
  // Throws OpenError if the file cannot serve the options or its lock is taken, and
  // invalid_argument if the options conflict.
  static std::shared_ptr<FileStorage> open(const std::string& path, const FileOptions& options);
  ~FileStorage() override;

  std::byte* mapped_base() const override { return mapped_base_; }
  bool mapping_can_shrink() const override { return mapped_base_ != nullptr; }
  void refresh_backing(int64_t now_ns) override;
  int validate(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  void copy_cached(base::host_copy* copies, uint32_t count) override;
  bool has_cached(uint64_t offset, uint64_t n) override;
  bool writes_inline() const override { return !direct(); }
  bool resolve(const Request& request, PieceList& pieces) override;
  bool resolve_flush(PieceList& pieces) override;
  int flush(IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  void collect_files(std::vector<int>& files) const override;
  Description describe() const override;

  // Relaxed: both paths read the same bytes.
  bool direct() const { return direct_.load(std::memory_order_relaxed); }
  // Statistics of the reads; null for a file that cannot switch.
  ReadCensus* census() const { return census_.get(); }
  // Makes later reads bypass the page cache, or use it. Returns false if this file cannot switch.
  bool choose_direct(bool direct);
  const std::string& path() const { return path_; }
  int fd() const { return io_.fd(); }
  int direct_fd() const { return io_.direct_fd(); }
  uint64_t file_offset() const { return file_offset_; }

 private:
  struct Opened;
  explicit FileStorage(Opened&& opened);

  Piece piece(uint64_t offset, uint64_t n, uint32_t request_offset, bool through_cache) const;
  int zero_by_writing(uint64_t offset, uint64_t n, IoFailure* failure);
  int check_extent(uint64_t offset, uint64_t n);
  uint64_t look_at_size();
  int check_kept();
  void note_read(uint64_t offset, uint64_t n, bool waited) const;
  int fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const;

  const std::string path_;
  FileIo io_;
  const uint64_t file_offset_;
  const bool block_device_;
  const bool memory_file_system_;
  std::byte* const mapped_base_;
  std::atomic<bool> direct_;
  std::unique_ptr<ReadCensus> census_;
  std::unique_ptr<PageCacheWindow> window_;  // null: every read is a system call
  std::string window_refusal_;               // why there is no window
  std::unique_ptr<FileLock> lock_;           // null: not asked for
  std::atomic<bool> nowait_refused_{false};
  std::atomic<int64_t> refreshed_ns_{0};
  std::atomic<bool> written_{false};
};

}  // namespace fw::native
