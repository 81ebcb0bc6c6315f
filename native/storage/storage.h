// Storages, which hold the bytes of a namespace: host memory, a file, a block device, or several.
//
// Any number of threads share a storage. Calls on the I/O path never throw; they return 0, an errno
// value, or the error of an NVMe status (io/nvme_command.h). `read` and `write` block and move all
// bytes. `resolve` describes the same transfer as pieces of files, for an engine that submits them.
// A read of bytes that the file no longer has returns ENODATA ("truncated"), never zeros. A storage
// that overrides no more than it must is moved by blocking calls alone.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/fork_guard.h"
#include "flashwarp/base/platform.cuh"
#include "storage/block_locks.h"

namespace fw::native {

class IoEngine;
struct NvmeNamespace;

// Status of a read beyond the end of a file that was longer when it was opened.
inline constexpr int kTruncated = ENODATA;

// A block device has no end to be beyond: the kernel means bad blocks, or a drive that is gone.
inline int error_of_block_device(int error) { return error == kTruncated ? EIO : error; }

// Status of a flush of a file that another file has replaced: what was written has no name.
inline constexpr int kReplaced = ESTALE;

// Status of a transfer by a block map that was revoked: the blocks may be another file's by now.
inline constexpr int kRevoked = EREMCHG;

// The text of a status, for people.
std::string error_text(int error);

// Status of a request outside of the storage. Nothing was read or written.
inline constexpr int kOutOfRange = ERANGE;

// Status of any use in a forked child, where the library's threads do not exist.
inline constexpr int kForked = ENOTRECOVERABLE;

// Where an operation failed, for the person who reads the error.
struct IoFailure {
  std::string path;
  uint64_t file_offset = 0;
  uint64_t nbytes = 0;
};

// A file that cannot be opened as asked. `error` is an errno value.
class OpenError : public std::runtime_error {
 public:
  OpenError(int error_number, std::string message, std::string file)
      : std::runtime_error(std::move(message)), error(error_number), path(std::move(file)) {}
  int error;
  std::string path;
};

// One contiguous part of a transfer in one file, or in host memory when `fd` is -1.
struct Piece {
  int fd = -1;
  int buffered_fd = -1;  // the same file through the page cache, for the rest of short transfers
  const NvmeNamespace* nvme = nullptr;  // set: by NVMe commands, in multiples of the alignment
  uint32_t alignment = 1;               // of memory, offset and length; 1 through the page cache
  BlockClaim claim;                     // of a write past the page cache, while it is under way
  uint32_t block_bytes = 0;  // set: a part of a block of so many bytes, which is read and written
  bool block_device = false;
  uint32_t nbytes = 0;
  uint32_t request_offset = 0;  // of this part in the caller's buffer
  uint64_t file_offset = 0;
  std::byte* memory = nullptr;
  const std::string* path = nullptr;
};

// The parts of one transfer. The bound keeps commands in flight small and free of allocation. It
// allows 2 MiB over stripes of 128 KiB; blocking calls move a transfer of more parts.
class PieceList {
 public:
  static constexpr uint32_t kCountMax = 16;
  bool add(const Piece& piece) {
    if (count_ == kCountMax) return false;
    pieces_[count_++] = piece;
    return true;
  }
  void clear() { count_ = 0; }
  uint32_t size() const { return count_; }
  Piece& operator[](uint32_t index) { return pieces_[index]; }

 private:
  Piece pieces_[kCountMax];
  uint32_t count_ = 0;
};

// A transfer to be resolved into pieces.
struct Request {
  uint64_t offset = 0;
  uint32_t nbytes = 0;
  bool is_write = false;
  uint32_t turn = 0;            // distributes reads over replicas
  uint32_t attempt = 0;         // counts replicas that have failed
  uint32_t request_offset = 0;  // added to that of every piece
};

// Facts for people, in order. `children` describes nested storages.
struct Description {
  using Value = std::variant<std::string, uint64_t, bool>;
  std::vector<std::pair<std::string, Value>> facts;
  std::vector<Description> children;
  void add(std::string name, Value value) { facts.emplace_back(std::move(name), std::move(value)); }
};

class Storage {
 public:
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  uint64_t nbytes() const { return nbytes_; }
  bool writable() const { return writable_; }
  bool in_forked_child() const { return fork_guard_.in_child(); }

  // Contiguous host memory that is the namespace, or null.
  virtual std::byte* mapped_base() const { return nullptr; }

  // Bytes of the mapping that the file backs, at the last look. A mapping cannot give more than
  // such a look, up to a millisecond old, so relaxed is enough.
  uint64_t backed_nbytes() const { return backed_nbytes_.load(std::memory_order_relaxed); }

  // Whether other processes may truncate the mapped file.
  virtual bool mapping_can_shrink() const { return false; }

  // Looks again at the size of a mapped file, at most once a millisecond of `now_ns`.
  virtual void refresh_backing(int64_t /*now_ns*/) {}

  // Returns 0, or ENODATA if [offset, offset + n) of the mapping is not backed any more.
  virtual int validate(uint64_t offset, uint64_t n, IoFailure* failure = nullptr);

  virtual int read(uint64_t offset, void* data, size_t n, IoFailure* failure = nullptr) = 0;
  virtual int write(uint64_t offset, const void* data, size_t n, IoFailure* failure = nullptr) = 0;

  // As `read`, but returns EAGAIN instead of waiting for bytes that are not in memory.
  virtual int read_nowait(uint64_t /*offset*/, void* /*data*/, size_t /*n*/,
                          IoFailure* /*failure*/ = nullptr) {
    return EAGAIN;
  }

  // Makes those of `copies` whose bytes are in memory now, and marks them as done. Waits for
  // nothing. A storage that every read has to pass makes none.
  virtual void copy_cached(base::host_copy* /*copies*/, uint32_t /*count*/) {}

  // Whether `copy_cached` would make a copy of [offset, offset + n).
  virtual bool has_cached(uint64_t /*offset*/, uint64_t /*n*/) { return false; }

  // Whether `write` only copies into memory or the page cache.
  virtual bool writes_inline() const { return false; }

  // Appends the parts of a transfer. Returns false if blocking calls have to move it, because it
  // has too many parts or would fail.
  virtual bool resolve(const Request& /*request*/, PieceList& /*pieces*/) { return false; }

  // Appends one piece for each file that `flush` has to synchronise.
  virtual bool resolve_flush(PieceList& /*pieces*/) { return false; }

  // How many replicas can serve a read.
  virtual uint32_t replica_count() const { return 1; }

  virtual int flush(IoFailure* failure = nullptr) = 0;

  // Makes completed writes of [offset, offset + n) durable (FUA), and possibly other writes too.
  virtual int flush_range(uint64_t /*offset*/, uint64_t /*n*/, IoFailure* failure = nullptr) {
    return flush(failure);
  }

  virtual int discard(uint64_t offset, uint64_t n, IoFailure* failure = nullptr) = 0;
  virtual int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure = nullptr) = 0;

  // Appends every descriptor that `resolve` may name.
  virtual void collect_files(std::vector<int>& files) const { (void)files; }

  // Whether `resolve` may name NVMe namespaces.
  virtual bool takes_nvme_commands() const { return false; }

  // May wrap the engine of a queue pair before its first use, to see operations on its files.
  virtual std::unique_ptr<IoEngine> decorate(std::unique_ptr<IoEngine> engine);

  virtual Description describe() const = 0;

 protected:
  Storage(uint64_t nbytes, bool writable)
      : nbytes_(nbytes), writable_(writable), backed_nbytes_(nbytes) {}

  // Return 0, or the status of a request that must not reach the medium.
  int check_range(uint64_t offset, uint64_t n) const;
  int check_write(uint64_t offset, uint64_t n) const;

  // A description that begins with the kind, the path if there is one, and the size.
  Description describe_as(std::string kind, const std::string& path = "") const;

  void set_backed_nbytes(uint64_t n) { backed_nbytes_.store(n, std::memory_order_relaxed); }

 private:
  const uint64_t nbytes_;
  const bool writable_;
  std::atomic<uint64_t> backed_nbytes_;
  ForkGuard fork_guard_;
};

// The storage; throws invalid_argument for null.
std::shared_ptr<Storage> require_storage(std::shared_ptr<Storage> storage);

// Monotonic time in nanoseconds.
int64_t monotonic_ns();

}  // namespace fw::native
