// The inside of the engine: what its threads share. See batch_engine.h.
//
// polling.cpp has the polling thread, which alone deals chunks; working.cpp the workers. Locks are
// taken in the order port, batch, meter, and never while data moves.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "nvme/sleepers.h"
#include "pipeline/batch_engine.h"
#include "pipeline/mover.h"
#include "pipeline/overlaps.h"

namespace fw::native::pipeline {

// How long both kinds of threads look for work before they sleep.
inline constexpr int64_t kSpinNs = 20'000;

// Measures windows of batches, and decides how many workers serve the next one.
class Meter {
 public:
  Meter(const WorkerLimits& limits, uint32_t first);

  uint32_t active() const { return active_.load(std::memory_order_relaxed); }
  // A chunk was dealt, or is complete; a batch has ended. Returns true if the count has changed.
  void chunk_opens(int64_t now_ns);
  void chunk_closes(int64_t now_ns);
  bool batch_ends(int64_t now_ns, uint64_t nbytes);

  void read(EngineStats& stats) const;
  uint64_t decision_count() const {
    const std::lock_guard guard(lock_);
    return decision_count_;
  }

 private:
  void advance(int64_t now_ns);

  const WorkerLimits limits_;
  mutable std::mutex lock_;
  std::atomic<uint32_t> active_;
  WorkerState state_;
  WorkerWindow window_;
  uint32_t batches_ = 0;  // of the window
  uint32_t open_ = 0;     // chunks
  int64_t last_ns_ = 0;   // until then times are counted; 0: nothing was measured yet
  int64_t io_ns_ = 0, idle_ns_ = 0;
  std::deque<WorkerDecision> decisions_;
  uint64_t decision_count_ = 0;
};

// Rows, or a part of one, that are neighbours in the storage and in memory.
struct Span {
  Chunk* chunk = nullptr;
  uint64_t first_row = 0;  // of the batch
  uint64_t inside = 0;     // where in it the span begins
  uint64_t offset = 0;     // in the storage
  uint64_t memory = 0;
  uint64_t nbytes = 0;
};

struct BatchEngine::Core {
  explicit Core(EngineOptions given, std::unique_ptr<StreamSide> side);

  // Polling thread.
  void poll();
  bool take(Port& port);
  bool take_next(Port& port, bool follows);
  bool deal(Port& port);
  void deal_next(Port& port, const std::shared_ptr<Batch>& batch);
  void hand_out(std::shared_ptr<Chunk> chunk, bool late);
  bool deal_waiting(Port& port);
  bool may_deal(const Port& port, const Batch& batch) const;
  bool feed_stream(Port& port);
  void check_limits(int64_t now_ns);
  void end_overdue(Port& port, const std::shared_ptr<Batch>& batch, std::string why);
  void give_up(const std::string& why);
  void end_everything();
  std::string waited_for(Port& port, const Batch& batch);

  // Workers.
  void work(uint32_t index);
  bool fetch(uint32_t index, Mover& mover, std::vector<EndedRun>& ended);
  void fill(const Deal& deal, uint32_t part, uint32_t index, Mover& mover);
  uint64_t fill_bytes(Chunk& chunk, uint64_t position, uint64_t end, uint32_t index, Mover& mover,
                      Run& last);
  uint64_t neighbours(const int64_t* ids, uint64_t id, uint64_t most) const;
  uint64_t add_span(const Span& span, uint32_t owners, uint32_t index, Mover& mover, Run& last);
  void add_run(Run run, Mover& mover);
  void settle(Mover& mover, std::vector<EndedRun>& ended);
  void end_bytes(Chunk& chunk, uint64_t nbytes);

  // Either.
  void chunk_done(Chunk& chunk);
  void finish(Port& port, Batch& batch);
  bool finish_by_stream(Port& port, const Batch& batch, uint64_t failed);
  void wake_workers(uint32_t parts);

  EngineOptions options;
  std::vector<std::unique_ptr<Port>> ports;
  std::unique_ptr<StreamSide> stream;
  std::unique_ptr<IoEngineFactory> engines;
  Drives drives;
  std::vector<std::unique_ptr<Mover>> movers;
  Meter meter;

  // Chunks with parts that no worker has taken: of all workers, or of each one that owns drives.
  std::mutex queue_lock;
  std::deque<std::shared_ptr<Deal>> queue;
  std::vector<std::deque<std::shared_ptr<Deal>>> own_queues;

  std::unique_ptr<Overlaps> overlaps;  // the polling thread's; null: nothing is written
  // Whether rows wait, so that ends of batches wake the polling thread.
  std::atomic<bool> rows_wait{false};

  Sleepers polling;                                 // of the polling thread
  std::vector<std::unique_ptr<Sleepers>> sleepers;  // of each worker
  Sleepers waiters;                                 // of callers of `wait`
  std::atomic<uint32_t> kernels{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> workers_end{false};
  // Workers abort what is in flight when this changes.
  std::atomic<uint32_t> aborts{0};
  // The polling thread's: time in which the process ran, the last look, and when workers were asked
  // to abort (0: they were not).
  int64_t ran_ns = 1, looked_ns = 0, aborted_ns = 0;
  std::atomic<bool> broken{false};
  std::string broken_reason;                      // the polling thread's
  std::vector<std::shared_ptr<Chunk>> abandoned;  // runs of them may still be in flight

  std::mutex life;
  std::condition_variable a_thread_ended;
  std::vector<std::thread> threads;
  std::vector<bool> over;        // of each thread
  std::vector<int64_t> used_ns;  // of each thread that is over: its CPU time
  std::atomic<uint64_t> runs{0}, overdue{0};
  std::atomic<uint64_t> batches_ended[2] = {}, rows_ended[2] = {}, bytes_ended[2] = {},
                        rows_failed[2] = {};
};

}  // namespace fw::native::pipeline
