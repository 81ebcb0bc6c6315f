// The host's engine of batches: it moves rows between a storage and a buffer or a pinned ring.
//
// A polling thread takes requests from the regions (flashwarp/batch/regions.cuh) and deals them to
// worker threads, each with queue pairs of its own. A row that fails has its status, and the others
// and later batches go on. The thread sleeps while no ticket is expected. No thread calls CUDA;
// what must (kernels' batches on a GPU) is a stream side, given by the caller.
//
// Any thread may call. In a child of fork() nothing works, and nothing is waited for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "nvme/error_log.h"
#include "nvme/model/ssd_model.h"
#include "pipeline/port.h"
#include "pipeline/worker_count.h"
#include "storage/storage.h"

namespace fw::native::pipeline {

// Moves chunks of the ring for kernels' batches, in order, and stores words behind them. A call
// only queues; returns false if nothing more can be queued.
class StreamSide {
 public:
  virtual ~StreamSide() = default;
  virtual bool copy(uint64_t target, uint64_t source, uint64_t nbytes) = 0;
  virtual bool store(uint64_t word, uint64_t value) = 0;
  // Stores the word that ends a batch. Calls failed() before, if a copy of it may have failed.
  virtual bool finish(uint64_t word, uint64_t value, std::function<void()> failed) = 0;
  // What went wrong; empty: nothing.
  virtual std::string failure() = 0;
  // Ends within seconds; later calls return false.
  virtual void stop() = 0;
};

// A drive that is modelled, or served by threads of its own.
struct DriveOptions {
  std::shared_ptr<Storage> storage;
  std::optional<SsdParameters> model;
};

struct EngineOptions {
  std::shared_ptr<Storage> storage;
  uint64_t row_bytes = 0;
  uint64_t rows = 0;               // of the storage
  std::vector<PortOptions> ports;  // one for each direction at most
  WorkerLimits workers;
  int64_t limit_ns = 30'000'000'000;  // without any progress
  // What was asked to be aborted ends within this time, or never: a queue pair drains in 5 s.
  int64_t abort_ns = 8'000'000'000;
  // The drives on which the storage lies: one, or a stripe's members in order. None: the workers
  // serve the storage themselves.
  std::vector<DriveOptions> drives;
  uint32_t drive_threads = 1;  // serving threads of each; 0: workers serve
  uint32_t depth = 128;        // of each queue pair
};

struct WorkerDecision {
  int64_t time_ns = 0;
  uint32_t from = 0, to = 0;
  WorkerReason reason = WorkerReason::kNone;
  int64_t io_ns = 0, idle_ns = 0;  // of the window
};

struct EngineStats {
  uint32_t workers = 0;
  uint64_t batches[2] = {}, rows[2] = {}, nbytes[2] = {}, failed[2] = {}, runs = 0;
  uint64_t overdue = 0;
  int64_t io_ns = 0, idle_ns = 0;
  int64_t worker_cpu_ns = 0, polling_cpu_ns = 0;
  uint64_t polling_sleeps = 0;
  std::vector<WorkerDecision> decisions;  // the last ones
  uint64_t decision_count = 0;
  std::string engine;  // how files are read
};

class BatchEngine {
 public:
  // Throws invalid_argument for what cannot be, and system_error if no thread can be started.
  explicit BatchEngine(EngineOptions options, std::unique_ptr<StreamSide> stream = nullptr);
  ~BatchEngine();
  BatchEngine(const BatchEngine&) = delete;
  BatchEngine& operator=(const BatchEngine&) = delete;

  // Submits a batch of the host. `ids` are `rows` integers, copied before the return; null: a
  // sequence from row `first` on. Returns the ticket; 0 if its slot is not free yet.
  uint64_t submit(bool is_write, const int64_t* ids, uint64_t rows, uint64_t first,
                  uint64_t buffer);
  // Tickets up to this one are on their way, by a stream or by this thread: the polling thread
  // looks for them from now on.
  void announce(bool is_write, uint64_t ticket);
  // Kernels that may submit begin to run, or have ended.
  void kernels_begin();
  void kernels_end();

  // Waits until a ticket has ended, at most so long. Returns whether it has.
  bool wait(bool is_write, uint64_t ticket, int64_t limit_ns);
  bool ended(bool is_write, uint64_t ticket) const;
  // What became of an ended ticket; none if its slot has another one by now.
  std::optional<Outcome> outcome(bool is_write, uint64_t ticket);
  // The bytes of a batch in each chunk of the ring; 0: no ring.
  uint64_t step_bytes(bool is_write) const;

  std::vector<ErrorRecord> take_errors();
  EngineStats stats();
  // How often the number of workers has changed; cheap.
  uint64_t decision_count() const;
  bool in_forked_child() const { return fork_guard_.in_child(); }

  // Whether a thread did not end, so that the memory that it may use must stay.
  bool leaked() const { return leaked_.load(std::memory_order_acquire); }

  // Ends all threads within seconds. Batches that have not ended fail, and their words are stored.
  void stop();
  // After `stop`, if nothing leaked: lets go of the storage, so that its file can be locked again.
  void let_go();

 private:
  struct Core;
  Port& port(bool is_write) const;

  std::unique_ptr<Core> core_;
  // A thread is in a call that does not return: what it uses is never freed.
  std::atomic<bool> leaked_{false};
  ForkGuard fork_guard_;
};

}  // namespace fw::native::pipeline
