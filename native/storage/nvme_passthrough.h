// An NVMe namespace that the kernel's driver keeps, read and written by NVMe commands through its
// character device (/dev/ngXnY): no file system, no page cache, no block layer in between.
//
// The caller needs no alignment: reads are widened to logical blocks, and a write of a part of a
// block reads the rest first, one such write at a time. A writer claims the namespace's block
// device, so that nothing can be mounted or written there through the kernel meanwhile.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "io/nvme_command.h"
#include "storage/storage.h"

namespace fw::native {

class FileLock;

struct PassthroughOptions {
  uint64_t offset = 0;  // a multiple of the namespace's logical blocks
  uint64_t nbytes = 0;  // 0: to the end of the namespace
  bool writable = false;
  bool lock = true;                 // exclude other users by a FileLock
  bool claim = true;                // refuse to write what the kernel uses
  std::string block_device = {};    // the same namespace's, for claim, lock and page cache
  uint64_t max_transfer_bytes = 0;  // the kernel's limit; 0: only the drive's own (MDTS)
};

class NvmePassthrough final : public Storage {
 public:
  // Throws OpenError if the device is no namespace, the kernel refuses commands, or a block has
  // metadata; EBUSY if it is claimed by another; and invalid_argument for a range outside of it.
  static std::shared_ptr<NvmePassthrough> open(const std::string& path,
                                               const PassthroughOptions& options);
  ~NvmePassthrough() override;

  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  bool resolve(const Request& request, PieceList& pieces) override;
  bool resolve_flush(PieceList& pieces) override;
  int flush(IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  void collect_files(std::vector<int>& files) const override { files.push_back(where_.fd); }
  bool takes_nvme_commands() const override { return true; }
  Description describe() const override;

  uint32_t lba_bytes() const { return 1u << where_.lba_shift; }

 private:
  // What Identify says.
  struct Geometry {
    uint64_t nbytes = 0;
    uint32_t lba_shift = 9;
    uint64_t max_transfer_bytes = 0;
    bool has_write_zeroes = false;
    bool discard_zeroes = false;  // Deallocate is supported, and deallocated blocks read as zeros
    bool write_protected = false;
    std::string model;
    std::string serial;
  };
  class Opening;
  NvmePassthrough(Opening& opened, const PassthroughOptions& options);

  int move(bool is_write, uint64_t place, void* data, uint64_t n) const;
  int move_through(bool is_write, uint64_t place, std::byte* data, size_t n);
  int change_blocks(uint64_t place, uint64_t lead, const std::byte* data, size_t n,
                    std::byte* blocks);
  int fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const;
  int zero_by_writing(uint64_t offset, uint64_t n);

  const std::string path_;
  const NvmeNamespace where_;
  const Geometry geometry_;
  const uint64_t base_;
  const int block_fd_;  // -1: not accessible
  const int claim_fd_;  // -1: not claimed
  const std::string claim_;
  std::unique_ptr<FileLock> lock_;
  std::mutex partial_blocks_;
};

}  // namespace fw::native
