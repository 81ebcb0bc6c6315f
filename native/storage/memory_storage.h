// Host memory as a namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "storage/storage.h"

namespace fw::native {

// The memory [address, address + nbytes) belongs to the caller, who keeps it as long as the
// storage.
class MemoryStorage final : public Storage {
 public:
  MemoryStorage(void* address, uint64_t nbytes, bool writable);

  std::byte* mapped_base() const override { return base_; }
  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) override {
    return read(offset, data, n, failure);
  }
  bool writes_inline() const override { return true; }
  bool resolve(const Request& request, PieceList& pieces) override;
  bool resolve_flush(PieceList&) override { return true; }
  int flush(IoFailure*) override { return in_forked_child() ? kForked : 0; }
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override {
    return write_zeroes(offset, n, failure);
  }
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  Description describe() const override;

 private:
  std::byte* const base_;
  const std::string name_ = "host memory";
};

}  // namespace fw::native
