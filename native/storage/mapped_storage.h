// A file as the blocks of the device that it lies on: a storage over a storage, by a block map.
//
// It reads and writes past the file system, so it is right only as long as the file keeps its
// blocks; whoever makes it sees to that, and calls `revoke` before the file may change. Blocks that
// a write covers in part are the device's matter. Every transfer is a blocking call, so that
// `revoke` can wait for all of them.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "storage/storage.h"

namespace fw::native {

// Bytes [logical, logical + nbytes) of the file lie at `physical` of the device.
struct FileExtent {
  uint64_t logical;
  uint64_t physical;
  uint64_t nbytes;
};

class MappedStorage final : public Storage {
 public:
  // What no extent may split: no file system in use has larger sectors, or smaller blocks of pages.
  static constexpr uint64_t kBlockBytes = 4096;

  // `extents` follow one another from byte 0 and cover `nbytes` bytes. Their places are multiples
  // of kBlockBytes, lie within the device and do not overlap. Throws invalid_argument otherwise.
  MappedStorage(std::shared_ptr<Storage> device, std::vector<FileExtent> extents, uint64_t nbytes,
                bool writable, std::string name);

  // Refuses all further transfers, waits for those in flight, and makes completed writes durable.
  // Returns 0, ETIMEDOUT if some are in flight after `limit_ms`, or the error of the flush. May be
  // called again; in a forked child it does nothing.
  int revoke(uint32_t limit_ms);

  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int flush(IoFailure* failure) override;
  // Does nothing: the file system would not know that the blocks are gone.
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  Description describe() const override;

 private:
  // A transfer in flight, or why there is none.
  class Turn;

  // Calls act(device offset, bytes, bytes before it) for the parts of a range, until one fails.
  template <typename Act>
  int for_each_part(uint64_t offset, uint64_t n, Act act) const;
  // The same in a turn, if `refusal` is 0.
  template <typename Act>
  int transfer(int refusal, uint64_t offset, uint64_t n, IoFailure* failure, Act act);
  int fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const;

  const std::shared_ptr<Storage> device_;
  const std::vector<FileExtent> extents_;
  const std::string name_;
  std::mutex turns_;
  std::condition_variable none_in_flight_;
  uint32_t in_flight_ = 0;  // guarded by turns_, as is the next
  bool revoked_ = false;
};

}  // namespace fw::native
