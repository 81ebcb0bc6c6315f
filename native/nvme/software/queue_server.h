// The controller's side of one queue pair: a visit fetches commands, executes them and posts
// completions.
//
// Any thread may call `serve`; a try-lock lets one in at a time and nobody waits for it. Every
// fetched command is completed exactly once. Where the controller models a drive, a completion that
// is known before the drive would have it is held, and posted by whoever serves when its time has
// come.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "io/io_engine.h"
#include "nvme/controller.h"
#include "nvme/model/drive_queue.h"
#include "nvme/software/command_memory.h"
#include "nvme/software/commands.h"
#include "nvme/software/completions.h"
#include "nvme/software/controller_context.h"
#include "nvme/software/counters.h"
#include "nvme/software/in_flight.h"
#include "nvme/software/rings.h"

namespace fw::native {

class alignas(128) QueueServer {
 public:
  // `engine` may be null: then transfers that have to wait block the serving thread.
  QueueServer(const QueuePairAddresses& addresses, ControllerContext& context,
              std::unique_ptr<IoEngine> engine);
  QueueServer(const QueueServer&) = delete;
  QueueServer& operator=(const QueueServer&) = delete;

  // Cheap and lock-free: whether `serve` could move something. The time matters only to held
  // completions.
  bool has_work(int64_t now_ns) const {
    // Relaxed: serve() looks again under the lock. A stale answer costs one more look.
    if (!open_.load(std::memory_order_relaxed)) return false;
    return rings_.rung_tail() != published_head_.load(std::memory_order_relaxed) ||
           has_in_flight() || next_due_ns() <= now_ns;
  }
  bool has_in_flight() const { return in_flight_count_.load(std::memory_order_relaxed) != 0; }

  // No held completion is due before this; HeldCompletions::kNever when none is held.
  int64_t next_due_ns() const { return next_due_ns_.load(std::memory_order_relaxed); }

  // Moves what can be moved now; returns how many commands were fetched or completed.
  uint32_t serve();

  // Ends service: no new command is executed, those in flight finish or are cancelled, held
  // completions are posted ahead of their time, rung but unfetched ones complete as aborted where
  // the CQ has room. Bounded by a few seconds.
  void close();

  // Serves again after `close`, from where the rings stand.
  void reopen();

  uint16_t id() const { return rings_.id(); }
  const QueueCounters& counters() const { return counters_; }

 private:
  bool try_lock();
  void lock();
  void unlock();

  uint32_t fetch();
  uint32_t promised() const;
  uint32_t execute_batch(uint32_t count);
  void admit_arrivals();
  uint64_t whole_backed_lbas() const;
  void abort_rung();

  // Guarded by the serve lock.
  Rings rings_;
  Storage& storage_;
  std::byte* const mapped_base_;
  const uint64_t lbas_;
  const uint64_t transfer_lbas_max_;
  const bool refreshes_backing_;
  const std::unique_ptr<DriveQueue> drive_;  // null: no drive is modelled
  QueueCounters counters_;
  CommandMemory memory_;
  Completions completions_;
  const std::unique_ptr<InFlight> in_flight_;  // null: nothing has to wait
  Commands commands_;

  // Looked at by threads that do not hold the lock: on a line of their own.
  alignas(128) uint32_t lock_ = 0;
  std::atomic<bool> open_{true};
  std::atomic<uint32_t> in_flight_count_{0};
  std::atomic<int64_t> next_due_ns_{HeldCompletions::kNever};
  std::atomic<uint32_t> published_head_{0};
};

}  // namespace fw::native
