// A storage for tests that wraps another one and adds the faults of a plan.
//
// It has no mapping, so all accesses pass through it. Around a file, the controller uses its I/O
// engine, and a FaultyEngine adds the faults. Around other storages, or if `blocking`, every
// transfer is a blocking call, and this class adds the faults.
#pragma once

#include <cerrno>
#include <memory>
#include <string>

#include "io/io_engine.h"
#include "storage/file_storage.h"
#include "storage/storage.h"
#include "testing/fault_plan.h"

namespace fw::native {

class FaultyStorage final : public Storage {
 public:
  FaultyStorage(std::shared_ptr<Storage> inner, std::shared_ptr<FaultPlan> plan, bool blocking);

  FaultPlan& plan() { return *plan_; }

  int validate(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  // No `read_nowait`, because an operation that is tried twice would be counted twice.
  bool resolve(const Request& request, PieceList& pieces) override;
  bool resolve_flush(PieceList& pieces) override;
  int flush(IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  void collect_files(std::vector<int>& files) const override;
  std::unique_ptr<IoEngine> decorate(std::unique_ptr<IoEngine> engine) override;
  Description describe() const override;

 private:
  // Runs act(fault), or fails in its place, as the plan says.
  template <typename Act>
  int with_fault(FaultOperation operation, uint64_t offset, uint64_t n, IoFailure* failure,
                 Act act);
  int fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const;

  const std::shared_ptr<Storage> inner_;
  const std::shared_ptr<FaultPlan> plan_;
  const std::shared_ptr<FileStorage> file_;  // null: every transfer is a blocking call
  std::string path_;
  uint64_t file_offset_ = 0;
};

}  // namespace fw::native
