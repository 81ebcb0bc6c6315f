// Asynchronous transfers of files and NVMe namespaces: by io_uring if the kernel allows it,
// otherwise by threads.
//
// An engine belongs to one queue pair. One thread at a time uses it; threads may take turns. It
// owns no data: the memory of an operation must stay valid until its result is reaped.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fw::native {

struct NvmeNamespace;

struct IoOperation {
  enum class Kind : uint8_t { kRead, kWrite, kSync };
  Kind kind = Kind::kRead;
  bool durable = false;  // a write that must be on the medium when it completes (FUA)
  int fd = -1;
  const NvmeNamespace* nvme = nullptr;  // set: an NVMe command of whole blocks; see nvme_command.h
  uint32_t nbytes = 0;
  uint64_t offset = 0;
  void* memory = nullptr;
  uint64_t token = 0;  // returned with the result
};

struct IoResult {
  uint64_t token = 0;
  int32_t result = 0;  // bytes moved, kAllMoved, or -errno
};

// The result of an NVMe command that succeeded.
constexpr int32_t kAllMoved = INT32_MAX;

// The most results that a queue pair takes from its engine at a time.
constexpr uint32_t kReapMax = 64;

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  // How many more operations can be submitted before results are reaped.
  uint32_t free_slots() const { return capacity_ - in_flight_; }
  uint64_t kernel_enters() const { return kernel_enters_; }

  // Queues an operation, for which there must be a free slot. It starts at the next `kick` at the
  // latest.
  virtual void submit(const IoOperation& operation) = 0;
  virtual void kick() = 0;

  // Stores at most `limit` results. Returns their number. Never waits.
  virtual uint32_t reap(IoResult* results, uint32_t limit) = 0;

  // Asks to end operations in flight soon. Each still has a result: -ECANCELED or its own.
  virtual void cancel_all() = 0;

 protected:
  explicit IoEngine(uint32_t capacity) : capacity_(capacity) {}

  const uint32_t capacity_;
  uint32_t in_flight_ = 0;
  uint64_t kernel_enters_ = 0;
};

class IoThreadPool;

// Chooses the kind of engine for a controller and makes one for each queue pair. Any thread.
class IoEngineFactory {
 public:
  struct Options {
    std::vector<int> files;                             // descriptors that operations may name
    std::vector<std::pair<uint64_t, uint64_t>> memory;  // address, bytes that they may name
    uint32_t engines = 1;                               // how many share the lock limit
    bool nvme = false;                                  // operations may be NVMe commands
  };
  explicit IoEngineFactory(Options options);
  ~IoEngineFactory();

  // If the kernel refuses another ring, returns an engine of threads. If it refuses threads too,
  // returns null, and the caller's transfers block. The description says so.
  std::unique_ptr<IoEngine> make(uint32_t capacity);

  // Returns an engine that is made at its first operation, and has no descriptor before. If none
  // can be made, the results of its operations say that the caller must move the data itself. The
  // factory outlives it.
  std::unique_ptr<IoEngine> make_later(uint32_t capacity);

  // "io_uring", or "thread-pool: " or "blocking calls: " and the reason. If the kernel refuses an
  // engine's commands later, the description adds that.
  std::string description() const;

 private:
  std::unique_ptr<IoEngine> make_threaded(uint32_t capacity);

  const Options options_;
  mutable std::mutex mutex_;  // guards what follows
  bool use_io_uring_ = false;
  std::string description_;
  std::unique_ptr<IoThreadPool> pool_;
  // The errno with which the kernel refused an engine's commands, or 0.
  const std::shared_ptr<std::atomic<int>> refusal_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace fw::native
