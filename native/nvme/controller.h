// The contract of NVMe controllers: what arrays and launches need of one, and nothing else.
//
// A controller serves queue pairs to which kernels submit, and from which they consume, by
// themselves. The software controller (software/) is one, a drive through VFIO (native/vfio/)
// another: arrays, caches and launches use nothing but this contract. Every rung command gets
// exactly one completion, and its data is in place before that completion can be seen.
//
// Any thread may call anything at any time. In a child of fork() a controller has no threads: there
// it serves nothing, and `stop` only forgets.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/fork_guard.h"
#include "nvme/error_log.h"
#include "nvme/sleepers.h"
#include "storage/storage.h"

namespace fw::native {

// Where a queue pair lives. Rings are memory that submitters and controller share; doorbells are
// 4-byte words, or registers of a drive.
struct QueuePairAddresses {
  uint64_t sq = 0;
  uint64_t cq = 0;
  uint64_t sq_doorbell = 0;
  uint64_t cq_doorbell = 0;
  uint32_t depth = 0;
  uint16_t id = 0;         // 0 is the admin queue
  uint64_t heartbeat = 0;  // a word that the controller advances while the process runs; 0: none
};

// How much was done since the start, so that a caller knows whether commands wait.
struct ControllerProgress {
  uint64_t commands = 0;
  uint64_t waited = 0;  // of them, those that could not complete at once
};

class Controller {
 public:
  virtual ~Controller() = default;
  Controller(const Controller&) = delete;
  Controller& operator=(const Controller&) = delete;

  // The queue pairs that it serves; fixed at construction. Their memory outlives the controller.
  const std::vector<QueuePairAddresses>& queue_pairs() const { return queue_pairs_; }

  // Begins to serve, from where the rings stand. Nothing to do while it serves.
  virtual void start() = 0;

  // Drains: what is in flight completes or is cancelled, within seconds, and what was rung but not
  // fetched completes as aborted where its CQ has room. Afterwards nothing touches the rings or the
  // memory that commands name. Nothing to do when it has stopped.
  virtual void stop() = 0;

  virtual bool serving() const = 0;

  // Work is about to be rung: threads of the controller must not sleep through it. Costs at most
  // microseconds. A drive needs no wake-up.
  virtual void wake() {}

  // What `wake` wakes, for calls that may come after the controller's end; null: nothing.
  virtual std::shared_ptr<Sleepers> sleepers() { return nullptr; }

  // A launch begins, or has ended, whose threads call `serve_some` whenever they wait. When the
  // last one has ended, the controller serves alone what is still in flight.
  virtual void launch_begins() {}
  virtual void launch_ends() {}

  // Whether, from now on, nothing is rung but by such launches, or behind `wake`. Then threads may
  // sleep while there is no launch. At first it is not so.
  virtual void hear_launches([[maybe_unused]] bool all) {}

  // Serves in the calling thread, from queue pair `first_queue` on, until one of them has moved
  // commands; never waits. Returns how many commands moved: 0 if there were none (a drive always
  // returns 0), -1 if the controller has stopped.
  virtual int serve_some(uint32_t first_queue) = 0;

  // The storage whose bytes a thread may copy without a command (`Storage::copy_cached`), if a
  // queue pair permits it; null: each read passes the controller.
  virtual Storage* host_storage() { return nullptr; }

  virtual ControllerProgress progress() const = 0;

  // Returns and forgets the failures since the last call, oldest first.
  virtual std::vector<ErrorRecord> take_errors() = 0;

  // Facts for people; among them "kind" and "engine".
  virtual Description describe() const = 0;

  bool in_forked_child() const { return fork_guard_.in_child(); }

 protected:
  explicit Controller(std::vector<QueuePairAddresses> queue_pairs)
      : queue_pairs_(std::move(queue_pairs)) {}

 private:
  const std::vector<QueuePairAddresses> queue_pairs_;
  ForkGuard fork_guard_;
};

}  // namespace fw::native
