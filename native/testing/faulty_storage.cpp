// Faults in blocking calls; see faulty_storage.h.
#include "testing/faulty_storage.h"

#include <cerrno>
#include <chrono>
#include <thread>

#include "testing/faulty_engine.h"

namespace fw::native {
namespace {

void flip_bit(void* data, uint64_t draw, size_t n) {
  if (n == 0) return;
  const uint64_t bit = draw % (n * 8);
  static_cast<std::byte*>(data)[bit / 8] ^= std::byte(1u << bit % 8);
}

}  // namespace

FaultyStorage::FaultyStorage(std::shared_ptr<Storage> inner, std::shared_ptr<FaultPlan> plan,
                             bool blocking)
    : Storage(require_storage(inner)->nbytes(), inner->writable()),
      inner_(std::move(inner)),
      plan_(std::move(plan)),
      file_(blocking ? nullptr : std::dynamic_pointer_cast<FileStorage>(inner_)) {
  path_ = "faulty storage";
  if (const auto* file = dynamic_cast<const FileStorage*>(inner_.get())) {
    path_ = file->path();
    file_offset_ = file->file_offset();
  }
}

int FaultyStorage::fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const {
  if (error != 0 && failure != nullptr) *failure = {path_, file_offset_ + offset, n};
  return error;
}

template <typename Act>
int FaultyStorage::with_fault(FaultOperation operation, uint64_t offset, uint64_t n,
                              IoFailure* failure, Act act) {
  const Fault fault = plan_->next(operation, offset, n);
  switch (fault.kind) {
    case FaultKind::kError:
      // A storage retries after a transient error: its callers never see one.
      return is_transient(fault.error) ? act(fault) : fail(fault.error, offset, n, failure);
    case FaultKind::kHang:
      return fail(ETIMEDOUT, offset, n, failure);
    case FaultKind::kDelay:
      std::this_thread::sleep_for(std::chrono::microseconds(fault.delay_us));
      return act(fault);
    default:
      return act(fault);
  }
}

int FaultyStorage::validate(uint64_t offset, uint64_t n, IoFailure* failure) {
  return inner_->validate(offset, n, failure);
}

int FaultyStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return fail(status, offset, n, failure);
  return with_fault(FaultOperation::kRead, offset, n, failure, [&](const Fault& fault) {
    const int status = inner_->read(offset, data, n, failure);
    if (status == 0 && fault.kind == FaultKind::kFlip) flip_bit(data, fault.draw, n);
    return status;
  });
}

int FaultyStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  return with_fault(FaultOperation::kWrite, offset, n, failure, [&](const Fault& fault) {
    if (fault.kind != FaultKind::kTorn) return inner_->write(offset, data, n, failure);
    const uint64_t landed = partial_nbytes(fault.draw, n, kSectorBytes);
    const int status = inner_->write(offset, data, landed, failure);
    return status != 0 ? status : fail(EIO, offset, n, failure);
  });
}

bool FaultyStorage::resolve(const Request& request, PieceList& pieces) {
  return file_ != nullptr && file_->resolve(request, pieces);
}

bool FaultyStorage::resolve_flush(PieceList& pieces) {
  return file_ != nullptr && file_->resolve_flush(pieces);
}

int FaultyStorage::flush(IoFailure* failure) {
  if (in_forked_child()) return fail(kForked, 0, 0, failure);
  return with_fault(FaultOperation::kFlush, 0, nbytes(), failure,
                    [&](const Fault&) { return inner_->flush(failure); });
}

int FaultyStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  return with_fault(FaultOperation::kDiscard, offset, n, failure,
                    [&](const Fault&) { return inner_->discard(offset, n, failure); });
}

int FaultyStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  return with_fault(FaultOperation::kWriteZeroes, offset, n, failure,
                    [&](const Fault&) { return inner_->write_zeroes(offset, n, failure); });
}

void FaultyStorage::collect_files(std::vector<int>& files) const {
  if (file_ != nullptr) file_->collect_files(files);
}

std::unique_ptr<IoEngine> FaultyStorage::decorate(std::unique_ptr<IoEngine> engine) {
  if (file_ == nullptr) return engine;
  return std::make_unique<FaultyEngine>(std::move(engine), plan_, file_);
}

Description FaultyStorage::describe() const {
  Description description = describe_as("faulty");
  description.add("faults", std::string(file_ != nullptr ? "in the engine" : "in calls"));
  description.children.push_back(inner_->describe());
  return description;
}

}  // namespace fw::native
