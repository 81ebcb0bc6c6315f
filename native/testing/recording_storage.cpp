// The record of changes; see recording_storage.h.
#include "testing/recording_storage.h"

#include <algorithm>
#include <cerrno>

namespace fw::native {

RecordingStorage::RecordingStorage(std::shared_ptr<Storage> inner, uint64_t data_nbytes_max)
    : Storage(require_storage(inner)->nbytes(), inner->writable()),
      inner_(std::move(inner)),
      data_nbytes_max_(data_nbytes_max) {}

std::vector<RecordingStorage::Event> RecordingStorage::events() const {
  const std::lock_guard guard(lock_);
  return events_;
}

void RecordingStorage::clear() {
  const std::lock_guard guard(lock_);
  events_.clear();
  data_nbytes_ = 0;
}

void RecordingStorage::mark(uint64_t label) {
  record({.kind = Kind::kMark, .offset = label}, [] { return 0; });
}

template <typename Act>
int RecordingStorage::record(Event event, Act act) {
  // Before the lock: a flush that waits for a write here began before the write ended.
  event.begin = clock_.fetch_add(1, std::memory_order_seq_cst);
  const std::lock_guard guard(lock_);
  const int status = act();
  event.failed = status != 0;
  event.end = clock_.fetch_add(1, std::memory_order_seq_cst);
  data_nbytes_ += event.data.size();
  events_.push_back(std::move(event));
  return status;
}

int RecordingStorage::validate(uint64_t offset, uint64_t n, IoFailure* failure) {
  return inner_->validate(offset, n, failure);
}

int RecordingStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  return inner_->read(offset, data, n, failure);
}

int RecordingStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  {
    const std::lock_guard guard(lock_);
    if (n > data_nbytes_max_ - std::min(data_nbytes_, data_nbytes_max_)) {
      if (failure != nullptr) *failure = {"the record of a test", offset, n};
      return ENOMEM;
    }
  }
  const auto* bytes = static_cast<const std::byte*>(data);
  Event event{.kind = Kind::kWrite, .offset = offset, .nbytes = n};
  event.data.assign(bytes, bytes + n);
  // From the copy, because the caller's buffer may change meanwhile.
  const std::byte* copy = event.data.data();
  return record(std::move(event), [=, this] { return inner_->write(offset, copy, n, failure); });
}

int RecordingStorage::flush(IoFailure* failure) {
  if (in_forked_child()) return kForked;
  return record({.kind = Kind::kFlush}, [&] { return inner_->flush(failure); });
}

int RecordingStorage::flush_range(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  return record({.kind = Kind::kFlushRange, .offset = offset, .nbytes = n},
                [&] { return inner_->flush_range(offset, n, failure); });
}

int RecordingStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  return record({.kind = Kind::kDiscard, .offset = offset, .nbytes = n},
                [&] { return inner_->discard(offset, n, failure); });
}

int RecordingStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  return record({.kind = Kind::kWriteZeroes, .offset = offset, .nbytes = n},
                [&] { return inner_->write_zeroes(offset, n, failure); });
}

Description RecordingStorage::describe() const {
  Description description = describe_as("recording");
  description.children.push_back(inner_->describe());
  return description;
}

}  // namespace fw::native
