// Faults in asynchronous operations; see faulty_engine.h.
#include "testing/faulty_engine.h"

#include <algorithm>
#include <cerrno>
#include <limits>

namespace fw::native {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// A buffered transfer may stop between sectors; one that bypasses the page cache, between pages.
constexpr uint64_t kDirectUnitBytes = 4096;

FaultOperation operation_of(IoOperation::Kind kind) {
  if (kind == IoOperation::Kind::kRead) return FaultOperation::kRead;
  return kind == IoOperation::Kind::kWrite ? FaultOperation::kWrite : FaultOperation::kFlush;
}

}  // namespace

FaultyEngine::FaultyEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<FaultPlan> plan,
                           std::shared_ptr<const FileStorage> file)
    : IoEngine(inner->free_slots()),
      inner_(std::move(inner)),
      plan_(std::move(plan)),
      file_(std::move(file)) {}

bool FaultyEngine::is_ours(const IoOperation& operation) const {
  return operation.fd == file_->fd() || operation.fd == file_->direct_fd();
}

Fault FaultyEngine::next_fault(const IoOperation& operation) {
  if (!is_ours(operation)) return {};
  if (operation.kind == IoOperation::Kind::kSync) {
    return plan_->next(FaultOperation::kFlush, 0, file_->nbytes());
  }
  // A widened direct read may begin before the namespace.
  const uint64_t base = file_->file_offset();
  const uint64_t offset = operation.offset > base ? operation.offset - base : 0;
  return plan_->next(operation_of(operation.kind), offset, operation.nbytes);
}

uint32_t FaultyEngine::partial(const Fault& fault, const IoOperation& operation) const {
  const bool direct = operation.fd == file_->direct_fd();
  return uint32_t(
      partial_nbytes(fault.draw, operation.nbytes, direct ? kDirectUnitBytes : kSectorBytes));
}

void FaultyEngine::submit(const IoOperation& operation) {
  ++in_flight_;
  const Fault fault = next_fault(operation);
  const bool is_sync = operation.kind == IoOperation::Kind::kSync;
  IoOperation changed = operation;
  switch (fault.kind) {
    case FaultKind::kNone:
      return inner_->submit(operation);
    case FaultKind::kError:
      return hold({operation.token, -fault.error}, 0);
    case FaultKind::kHang:
      return hold({operation.token, -ECANCELED}, kNever);
    case FaultKind::kTorn:
    case FaultKind::kShort:
      if (is_sync) break;
      changed.nbytes = partial(fault, operation);
      if (changed.nbytes != 0) break;
      return hold({operation.token, fault.kind == FaultKind::kTorn ? -EIO : 0}, 0);
    default:
      break;
  }
  const int64_t delay_ns = int64_t(fault.delay_us) * 1000;
  changes_[operation.token] = {fault, changed, delay_ns == 0 ? 0 : monotonic_ns() + delay_ns};
  inner_->submit(changed);
}

void FaultyEngine::kick() {
  inner_->kick();
  kernel_enters_ = inner_->kernel_enters();
}

void FaultyEngine::take_inner_results() {
  IoResult results[kReapMax];
  while (const uint32_t count = inner_->reap(results, kReapMax)) {
    for (uint32_t i = 0; i < count; ++i) {
      IoResult result = results[i];
      const auto found = changes_.find(result.token);
      if (found == changes_.end()) {
        hold(result, 0);
        continue;
      }
      const Change change = found->second;
      changes_.erase(found);
      if (change.fault.kind == FaultKind::kTorn && result.result >= 0 &&
          change.operation.kind == IoOperation::Kind::kWrite) {
        result.result = -EIO;
      }
      if (change.fault.kind == FaultKind::kFlip && result.result > 0 &&
          change.operation.kind == IoOperation::Kind::kRead) {
        const uint64_t bit = change.fault.draw % (uint64_t(result.result) * 8);
        static_cast<std::byte*>(change.operation.memory)[bit / 8] ^= std::byte(1u << bit % 8);
      }
      hold(result, change.due_ns);
    }
  }
}

uint32_t FaultyEngine::reap(IoResult* results, uint32_t limit) {
  take_inner_results();
  const int64_t now = monotonic_ns();
  uint32_t count = 0;
  std::erase_if(held_, [&](const Held& held) {
    if (count == limit || held.due_ns > now) return false;
    results[count++] = held.result;
    return true;
  });
  in_flight_ -= count;
  return count;
}

void FaultyEngine::cancel_all() {
  for (Held& held : held_) held.due_ns = 0;
  inner_->cancel_all();
}

}  // namespace fw::native
