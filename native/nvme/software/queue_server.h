// The controller's side of one queue pair: `serve` fetches commands, executes them and posts
// completions.
//
// Any thread may call `serve`. A try-lock admits one thread at a time, and no thread waits for it.
// Every fetched command completes exactly once. If the controller models a drive, a completion that
// is known before its modelled time is held, and a later `serve` posts it.
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
#include "nvme/software/counters.h"
#include "nvme/software/in_flight.h"
#include "nvme/software/rings.h"

namespace fw::native {

class alignas(128) QueueServer {
 public:
  // Without an engine (null), transfers that have to wait block the serving thread.
  QueueServer(const QueuePairAddresses& addresses, ControllerContext& context,
              std::unique_ptr<IoEngine> engine);
  QueueServer(const QueueServer&) = delete;
  QueueServer& operator=(const QueueServer&) = delete;

  // Whether `serve` could move something. Cheap and lock-free. `now_ns` matters only to held
  // completions.
  bool has_work(int64_t now_ns) const {
    // Relaxed: serve() looks again under the lock, so a stale answer only costs one more look.
    if (!open_.load(std::memory_order_relaxed)) return false;
    return rings_.rung_tail() != published_head_.load(std::memory_order_relaxed) ||
           has_in_flight() || next_due_ns() <= now_ns;
  }
  bool has_in_flight() const { return in_flight_count_.load(std::memory_order_relaxed) != 0; }

  // No held completion is due before this; HeldCompletions::kNever if none is held.
  int64_t next_due_ns() const { return next_due_ns_.load(std::memory_order_relaxed); }

  // Moves what can be moved now. Returns how many commands it fetched or completed.
  uint32_t serve();

  // Ends service within a few seconds. No new command is executed; commands in flight finish or are
  // cancelled; held completions are posted early; commands that were rung but not fetched complete
  // as aborted if the CQ has room.
  void close();

  // Serves again after `close`, from where the rings stand.
  void reopen();

  uint16_t id() const { return rings_.id(); }
  const QueueCounters& counters() const { return counters_; }

 private:
  auto poster() {
    return [this](uint16_t cid, uint16_t status) { rings_.post(cid, status); };
  }
  uint32_t fetch();
  uint32_t promised() const;
  uint32_t execute_fetched(uint32_t count);
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

  // Read by threads without the lock, so on a cache line of their own.
  alignas(128) uint32_t lock_ = 0;
  std::atomic<bool> open_{true};
  std::atomic<uint32_t> in_flight_count_{0};
  std::atomic<int64_t> next_due_ns_{HeldCompletions::kNever};
  std::atomic<uint32_t> published_head_{0};
};

}  // namespace fw::native
