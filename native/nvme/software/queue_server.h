// The controller's side of one queue pair: fetches commands, executes them, posts completions.
//
// Any thread may call `serve`; a try-lock lets one in at a time and nobody waits for it. Every
// fetched command is completed exactly once: a command is fetched only when its completion has a
// reserved place in the CQ, so unconsumed entries are never overwritten. Commands that move no
// data, or only memory and page-cache data, complete inside `serve`; the others go through an
// IoEngine. Where the controller models a drive, a completion that is known before the drive would
// have it is held, and posted by whoever serves when its time has come.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/nvme/command.cuh"
#include "io/io_engine.h"
#include "nvme/controller.h"
#include "nvme/error_log.h"
#include "nvme/model/held_completions.h"
#include "nvme/model/ssd_model.h"
#include "nvme/software/prp_walk.h"
#include "storage/storage.h"

namespace fw::native {

// What all queue pairs of a controller share. Read-only but for the log and the modelled drive.
struct ControllerContext {
  std::shared_ptr<Storage> storage;
  DmaRegions regions;
  uint64_t page_bytes;
  uint64_t max_transfer_bytes;
  ErrorLog errors;
  std::unique_ptr<ModelledDrive> drive =
      nullptr;  // null: completions are posted when they are known
};

// Counts commands by what they asked for.
enum class CommandKind : uint8_t {
  kFlush,
  kWrite,
  kRead,
  kWriteZeroes,
  kDatasetManagement,
  kIdentify,
  kOther,
  kCount,
};
inline constexpr size_t kCommandKinds = size_t(CommandKind::kCount);

// Written by whoever holds the serve lock, read by anyone: relaxed, and never a locked instruction.
class Counter {
 public:
  void add(uint64_t n) {
    value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct QueueCounters {
  std::array<Counter, kCommandKinds> commands;
  Counter bytes_read, bytes_written, errors, doorbell_reads, engine_operations, kernel_enters,
      engine_fallbacks, held;
};

inline uint8_t opcode_of(const nvme::command& entry) { return uint8_t(entry.opcode_cid); }
inline uint16_t cid_of(const nvme::command& entry) { return uint16_t(entry.opcode_cid >> 16); }
inline uint64_t first_lba(const nvme::command& entry) {
  return entry.cdw10 | (uint64_t(entry.cdw11) << 32);
}

// Status field for an errno value; 0 is success.
uint16_t status_of_error(int error, bool is_write);

const char* command_name(CommandKind kind);

class alignas(128) QueueServer {
 public:
  // `engine` may be null: then transfers that have to wait block the serving thread.
  QueueServer(const QueuePairAddresses& addresses, ControllerContext& context,
              std::unique_ptr<IoEngine> engine);
  ~QueueServer();
  QueueServer(const QueueServer&) = delete;
  QueueServer& operator=(const QueueServer&) = delete;

  // Cheap and lock-free: whether `serve` could move something. The time matters only to held
  // completions.
  bool has_work(int64_t now_ns) const {
    // Relaxed: serve() looks again under the lock. A stale answer costs one more look.
    if (!open_.load(std::memory_order_relaxed)) return false;
    return atomic::load_relaxed(sq_doorbell_) != published_head_.load(std::memory_order_relaxed) ||
           has_in_flight() || next_due_ns() <= now_ns;
  }
  bool has_in_flight() const { return in_flight_.load(std::memory_order_relaxed) != 0; }

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

  uint16_t id() const { return id_; }
  const QueueCounters& counters() const { return counters_; }

 private:
  struct InFlight;
  // Bytes of the namespace that a command names. `total` counts a partial last LBA in full.
  struct Range {
    uint64_t offset = 0;
    uint32_t take = 0;
    uint32_t total = 0;
  };

  bool try_lock();
  void lock();
  void unlock();

  // The rings.
  uint32_t fetch();
  uint32_t fetchable(uint32_t tail);
  bool read_cq_doorbell();
  void fail_ring(const char* what, uint32_t value);
  uint32_t execute_batch(uint32_t count);
  uint64_t whole_backed_lbas() const;
  void advance_head();

  // The modelled drive.
  void arrive(uint16_t cid, uint32_t blocks);
  void admit_arrivals();
  void admit(bool is_write, uint32_t blocks);
  uint32_t post_due();
  void abort_rung();

  // The commands.
  void execute(const nvme::command& entry);
  void execute_admin(const nvme::command& entry);
  void execute_read(const nvme::command& entry);
  void execute_write(const nvme::command& entry);
  void execute_write_zeroes(const nvme::command& entry);
  void execute_dataset_management(const nvme::command& entry);
  void execute_flush(const nvme::command& entry);
  uint16_t block_range(const nvme::command& entry, bool moves_data, Range& range) const;
  bool is_identity(const nvme::command& entry, uint64_t offset) const;
  int read_now(const Range& range, bool may_wait, IoFailure& failure);
  int write_now(const Range& range, bool durable, IoFailure& failure);

  // The memory of the command at hand.
  uint16_t walk(const nvme::command& entry, uint64_t nbytes);
  void zero_tail(const Range& range);
  void copy_to_segments(uint64_t offset, const void* data, uint64_t nbytes);
  void copy_from_segments(uint64_t offset, void* data, uint64_t nbytes);

  // Commands that wait for the engine (queue_server_async.cpp).
  void allocate_in_flight();
  bool can_start() const;
  void start(const nvme::command& entry, const Range& range, bool is_write, bool durable);
  void start_flush(const nvme::command& entry);
  InFlight& acquire(const nvme::command& entry, const Range& range);
  void release(InFlight& command);
  bool prepare(InFlight& command);
  bool lay_out_scratch(InFlight& command);
  void submit(InFlight& command);
  void submit_piece(InFlight& command, uint32_t index);
  std::byte* memory_of(InFlight& command, uint32_t index) const;
  void kick_engine();
  uint32_t reap();
  void piece_done(InFlight& command, uint32_t index, int32_t result);
  int finish_piece(InFlight& command, uint32_t index, uint32_t done);
  bool command_done(InFlight& command);
  bool retry_on_replica(InFlight& command);
  void run_blocking(InFlight& command);
  void deliver(InFlight& command);
  void drain_engine();

  // The completions.
  CommandKind kind_of(const nvme::command& entry) const;
  void complete(uint16_t cid, uint16_t status, int64_t due_ns);
  void post(uint16_t cid, uint16_t status);
  void finish(const nvme::command& entry, uint16_t status);
  void finish_io(const nvme::command& entry, const Range& range, bool is_write, int error,
                 const IoFailure& failure);
  void reject(const nvme::command& entry, uint16_t status, const char* reason);
  void reject_namespace(const nvme::command& entry);
  void reject_range(const nvme::command& entry, uint16_t status);
  void reject_prp(const nvme::command& entry, uint16_t status);
  void record(const nvme::command& entry, uint16_t status, int error, const IoFailure& failure,
              const char* reason, bool recovered);

  // Fixed at construction.
  nvme::command* const sq_;
  nvme::completion* const cq_;
  const uint32_t* const sq_doorbell_;
  const uint32_t* const cq_doorbell_;
  const uint32_t depth_;
  const uint16_t id_;
  const bool refreshes_backing_;
  ControllerContext& context_;
  ModelledDrive* const drive_;
  Storage& storage_;
  std::byte* const mapped_base_;
  const uint64_t lbas_;

  // Ring state, guarded by the serve lock.
  uint32_t head_ = 0;          // next SQ entry to fetch
  uint32_t cq_tail_ = 0;       // next CQ entry to post
  uint32_t cq_head_seen_ = 0;  // last value of the CQ head doorbell
  uint16_t phase_ = 1;
  bool closing_ = false;
  bool failed_ = false;  // a doorbell was invalid: nothing is fetched from these rings any more
  std::vector<Segment> segments_;  // of the command at hand

  // With a modelled drive: the time of this visit, when the command at hand is due, and plain reads
  // of this visit that the drive has not taken in yet.
  int64_t now_ns_ = 0;
  int64_t due_ns_ = 0;
  std::unique_ptr<HeldCompletions> held_;
  std::vector<ModelledDrive::Arrival> arrivals_;
  std::vector<uint16_t> arrival_cids_;
  std::vector<int64_t> arrival_dues_;

  // Commands in the engine. A context is built when it is first used, and the most recently used
  // one is reused first, so contexts and scratch that a load does not need cost no memory.
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<std::byte[]> contexts_;
  std::vector<uint32_t> free_contexts_;
  std::byte* scratch_ = nullptr;
  uint64_t scratch_stride_ = 0;
  uint64_t scratch_nbytes_ = 0;
  uint32_t turn_ = 0;

  QueueCounters counters_;

  // Looked at by threads that do not hold the lock: on a line of their own.
  alignas(128) uint32_t lock_ = 0;
  std::atomic<bool> open_{true};
  std::atomic<uint32_t> in_flight_{0};
  std::atomic<int64_t> next_due_ns_{HeldCompletions::kNever};
  std::atomic<uint32_t> published_head_{0};
};

}  // namespace fw::native
