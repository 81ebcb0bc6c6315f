// A storage that wraps another one and records every change, with its bytes and its order.
//
// For tests of what a power cut may leave. Every transfer is a blocking call, and changes are made
// one at a time, so the record has the order in which they reached the medium. `begin` and `end`
// are ticks of one clock: a flush makes durable what ended before it began.
#pragma once

#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <vector>

#include "storage/storage.h"

namespace fw::native {

class RecordingStorage final : public Storage {
 public:
  enum class Kind : uint8_t { kWrite, kDiscard, kWriteZeroes, kFlush, kFlushRange, kMark };
  struct Event {
    Kind kind;
    bool failed = false;
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t offset = 0;  // of a mark: its label
    uint64_t nbytes = 0;
    std::vector<std::byte> data = {};  // of a write
  };

  // Holds at most `data_nbytes_max` bytes of writes; further ones fail with ENOMEM.
  RecordingStorage(std::shared_ptr<Storage> inner, uint64_t data_nbytes_max);

  // A copy of the events since the storage was made or `clear` was called.
  std::vector<Event> events() const;
  void clear();

  // Adds a label to the events, such as "version 3 is committed".
  void mark(uint64_t label);

  int validate(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int flush(IoFailure* failure) override;
  int flush_range(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  Description describe() const override;

 private:
  // Runs act(), one at a time, and appends `event` with its times and its result.
  template <typename Act>
  int record(Event event, Act act);

  const std::shared_ptr<Storage> inner_;
  const uint64_t data_nbytes_max_;
  mutable std::mutex lock_;
  std::atomic<uint64_t> clock_{0};
  std::vector<Event> events_;
  uint64_t data_nbytes_ = 0;
};

}  // namespace fw::native
