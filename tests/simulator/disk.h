// The storage below the controllers: memory that fails, waits and tears as the seed says.
//
// Commands that wait go through an engine that finishes them late, in any order, in part or not at
// all, so that the controller's asynchronous half runs as it does over files.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/io_engine.h"
#include "run.h"
#include "storage/storage.h"

namespace fw::simulator {

class Disk final : public native::Storage {
 public:
  // The bytes stay the caller's; so do those at `mapped`, where the device finds them in place, or
  // null.
  Disk(char* data, uint64_t nbytes, char* mapped, const Faults& faults, uint64_t seed);
  ~Disk() override;

  // From now on nothing fails.
  void heal() { faults_ = {}; }

  std::byte* mapped_base() const override { return mapped_; }
  int read(uint64_t offset, void* data, size_t n, native::IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, native::IoFailure* failure) override;
  int read_nowait(uint64_t offset, void* data, size_t n, native::IoFailure* failure) override;
  bool writes_inline() const override { return !waits(); }
  bool resolve(const native::Request& request, native::PieceList& pieces) override;
  bool resolve_flush(native::PieceList& pieces) override;
  int flush(native::IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, native::IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, native::IoFailure* failure) override;
  native::Description describe() const override { return {}; }

  // Part of a transfer, or a negative errno.
  int32_t transfer(const native::IoOperation& operation);
  uint32_t draw_delay() { return faults_.delay == 0 ? 0 : random_.below(faults_.delay + 1); }
  uint32_t descriptor() const { return descriptor_; }

 private:
  bool waits() const { return faults_.wait != 0 && random_.chance(faults_.wait); }
  int error(bool is_write);

  std::byte* const data_;
  std::byte* const mapped_;
  Faults faults_;
  mutable Random random_;
  const uint32_t descriptor_;
  const std::string name_ = "simulated disk";
};

class DiskEngine final : public native::IoEngine {
 public:
  explicit DiskEngine(Disk& disk) : IoEngine(64), disk_(disk) {}
  void submit(const native::IoOperation& operation) override;
  void kick() override {}
  uint32_t reap(native::IoResult* results, uint32_t limit) override;
  void cancel_all() override {}

 private:
  struct Waiting {
    native::IoOperation operation;
    uint32_t sweeps;
  };
  Disk& disk_;
  std::vector<Waiting> waiting_;
};

}  // namespace fw::simulator
