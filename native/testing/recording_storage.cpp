// The record of changes; see recording_storage.h.
#include "testing/recording_storage.h"

#include <algorithm>
#include <cerrno>

namespace fw::native {
namespace {

std::shared_ptr<Storage> require_storage(std::shared_ptr<Storage> storage) {
  if (storage == nullptr) throw std::invalid_argument("the storage is None");
  return storage;
}

}  // namespace

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
  Event event{Kind::kMark};
  event.offset = label;
  record(std::move(event), [] { return 0; });
}

template <typename Act>
int RecordingStorage::record(Event event, Act act) {
  // Before the lock: a flush that had to wait for a write was not asked for after it.
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
  Event event{Kind::kWrite};
  event.offset = offset;
  event.nbytes = n;
  event.data.assign(bytes, bytes + n);
  // From the copy: the other side may change its buffer while it is read.
  const std::byte* copy = event.data.data();
  return record(std::move(event), [=, this] { return inner_->write(offset, copy, n, failure); });
}

int RecordingStorage::flush(IoFailure* failure) {
  if (in_forked_child()) return kForked;
  return record(Event{Kind::kFlush}, [&] { return inner_->flush(failure); });
}

int RecordingStorage::flush_range(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  Event event{Kind::kFlushRange};
  event.offset = offset;
  event.nbytes = n;
  return record(std::move(event), [&] { return inner_->flush_range(offset, n, failure); });
}

int RecordingStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  Event event{Kind::kDiscard};
  event.offset = offset;
  event.nbytes = n;
  return record(std::move(event), [&] { return inner_->discard(offset, n, failure); });
}

int RecordingStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  Event event{Kind::kWriteZeroes};
  event.offset = offset;
  event.nbytes = n;
  return record(std::move(event), [&] { return inner_->write_zeroes(offset, n, failure); });
}

Description RecordingStorage::describe() const {
  Description description;
  description.add("kind", std::string("recording"));
  description.add("nbytes", nbytes());
  description.add("writable", writable());
  description.children.push_back(inner_->describe());
  return description;
}

}  // namespace fw::native
