// The commands of a queue pair that wait for an IoEngine, each divided into pieces.
//
// If a command's memory is contiguous and aligned for its files, the engine uses it directly.
// Otherwise the pieces pass through an aligned scratch area, and direct reads are widened. A
// context is constructed when a command needs it, and the one used last is reused first, so
// contexts and scratch that a load does not need cost no memory. One thread at a time.
//
// A piece that holds blocks of its file (storage/block_locks.h) and cannot have them now waits
// here, and the others go on. A piece that is a part of a block is read into scratch, changed and
// written.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "io/io_engine.h"
#include "nvme/software/command_memory.h"
#include "nvme/software/completions.h"
#include "nvme/software/counters.h"

namespace fw::native {

class InFlight {
 public:
  // Stores the number of commands in flight in `count`, for threads without the serve lock.
  InFlight(const ControllerContext& context, uint32_t depth, std::unique_ptr<IoEngine> engine,
           CommandMemory& memory, Completions& completions, QueueCounters& counters,
           std::atomic<uint32_t>& count);
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Whether one more command may start.
  bool can_start() const {
    return !free_contexts_.empty() && engine_->free_slots() >= PieceList::kCountMax;
  }

  // Takes over the current command, after CommandMemory::walk.
  void start(const nvme::command& entry, const ByteRange& range, bool is_write, bool durable);
  void start_flush(const nvme::command& entry);

  // Submits to the operating system what was started.
  void kick();

  // Completes the commands that the engine has done. Returns their number.
  uint32_t reap();

  // Waits for all commands in flight, at most a few seconds. Cancels those that take long.
  void drain();

 private:
  struct Command;

  Command& context_of(uint32_t index) const;
  Command& acquire(const nvme::command& entry, const ByteRange& range);
  void release(Command& command);
  bool prepare(Command& command);
  bool lay_out_scratch(Command& command);
  void submit(Command& command);
  void submit_piece(Command& command, uint32_t index);
  bool hold(Command& command, uint32_t index);
  void submit_waiting();
  void end_waiting();
  void end_own_writes(Command& command);
  uint32_t reap_results();
  std::byte* memory_of(Command& command, uint32_t index) const;
  void merge(Command& command, uint32_t index) const;
  bool may_resubmit(Command& command);
  void piece_done(Command& command, uint32_t index, int32_t result);
  int finish_piece(Command& command, uint32_t index, uint32_t done);
  bool command_done(Command& command);
  bool retry_on_replica(Command& command);
  void run_blocking(Command& command);
  void finish(Command& command);
  void deliver(Command& command);
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  Storage& storage_;
  CommandMemory& memory_;
  Completions& completions_;
  QueueCounters& counters_;
  std::atomic<uint32_t>& count_;
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<std::byte[]> contexts_;
  std::vector<uint32_t> free_contexts_;
  std::byte* scratch_ = nullptr;
  uint64_t scratch_stride_ = 0;
  uint64_t scratch_nbytes_ = 0;
  uint32_t turn_ = 0;
  uint32_t holding_ = 0;           // pieces that hold blocks
  std::vector<uint64_t> waiting_;  // tokens of pieces that wait for blocks
  bool draining_ = false;
};

}  // namespace fw::native
