// An I/O engine that makes operations on one file fail, stop short, hang or come late, by a plan.
//
// It wraps the engine of a queue pair. Operations on other files pass unchanged. One thread at a
// time, as for every engine.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "io/io_engine.h"
#include "storage/file_storage.h"
#include "testing/fault_plan.h"

namespace fw::native {

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<FaultPlan> plan,
               std::shared_ptr<const FileStorage> file);

  void submit(const IoOperation& operation) override;
  void kick() override;
  uint32_t reap(IoResult* results, uint32_t limit) override;
  void cancel_all() override;

 private:
  // How to change the result of an operation that the inner engine runs.
  struct Change {
    Fault fault;
    IoOperation operation;
    int64_t due_ns = 0;
  };
  struct Held {
    IoResult result;
    int64_t due_ns = 0;
  };

  bool is_ours(const IoOperation& operation) const;
  Fault next_fault(const IoOperation& operation);
  uint32_t partial(const Fault& fault, const IoOperation& operation) const;
  void take_inner_results();
  void hold(IoResult result, int64_t due_ns) { held_.push_back({result, due_ns}); }

  const std::unique_ptr<IoEngine> inner_;
  const std::shared_ptr<FaultPlan> plan_;
  const std::shared_ptr<const FileStorage> file_;
  std::unordered_map<uint64_t, Change> changes_;  // by token
  std::vector<Held> held_;
};

}  // namespace fw::native
