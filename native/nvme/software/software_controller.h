// An NVMe controller in software: host threads that poll doorbells and serve one namespace.
//
// It owns its threads and the servers of its queue pairs. The rings and the memory that commands
// name belong to the caller and must outlive it. Threads that wait for completions may serve too
// (`serve_some`). Idle threads sleep, and `wake` wakes all at once. One of them looks at the
// doorbells each millisecond, unless it hears of all launches (`hear_launches`): then it sleeps
// until one begins, or ends and leaves something unfinished. If launches serve, and there is one
// thread, it ends after a long sleep, and the next `wake` starts it again: a process may hold more
// idle arrays than it may have threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nvme/controller.h"
#include "nvme/sleepers.h"
#include "nvme/software/identify.h"
#include "nvme/software/queue_server.h"

namespace fw::native {

struct ControllerOptions {
  uint32_t threads = 1;                   // 0: only callers of serve_some serve
  uint64_t page_bytes = 2 << 20;          // CC.MPS: a power of two, 4 KiB at least
  uint64_t max_transfer_bytes = 2 << 20;  // MDTS: a power of two, page-sized at least
  int64_t spin_ns = 100'000;              // how long a thread without work polls before it sleeps
  int64_t long_idle_ns = 100'000'000;     // after it a thread may sleep for long
  bool yields = false;  // threads sleep while launches serve, and leave them their cores
  std::optional<SsdParameters> model = {};  // completions come when this drive would send them
};

struct ControllerCounters {
  std::array<uint64_t, kCommandKinds> commands = {};
  uint64_t bytes_read = 0, bytes_written = 0, errors = 0, doorbell_reads = 0;
  uint64_t engine_operations = 0, engine_fallbacks = 0, kernel_enters = 0, held = 0;
  uint64_t sleeps = 0, wakes = 0;
  std::vector<std::pair<uint16_t, uint64_t>> queues;  // id, commands
};

class SoftwareController final : public Controller {
 public:
  // Throws invalid_argument for a size or address that is not possible.
  SoftwareController(std::shared_ptr<Storage> storage, std::vector<QueuePairAddresses> queue_pairs,
                     std::vector<std::pair<uint64_t, uint64_t>> dma_regions,
                     const ControllerOptions& options);
  ~SoftwareController() override;

  // After `stop` no thread of the controller exists.
  void start() override;
  void stop() override;
  bool serving() const override { return serving_.load(std::memory_order_acquire); }

  // Ends all sleep at once. If a thread that has retired cannot be started, launches serve alone
  // until the next call.
  void wake() override;
  std::shared_ptr<Sleepers> sleepers() override { return sleepers_; }
  void launch_begins() override;
  void launch_ends() override;
  void hear_launches(bool all) override;
  int serve_some(uint32_t first_queue) override;

  Storage* host_storage() override { return serving() ? context_.storage.get() : nullptr; }
  ControllerProgress progress() const override;
  std::vector<ErrorRecord> take_errors() override { return context_.errors.take(); }
  Description describe() const override;

  std::string engine_description() const {
    return engines_ == nullptr ? "memory" : engines_->description();
  }
  ControllerCounters counters() const;
  uint64_t errors_dropped() const { return context_.errors.dropped(); }
  const Storage& storage() const { return *context_.storage; }

  // What the Identify command returns for CNS 01h and 00h.
  IdentifyData identify_controller_data() const {
    return identify_controller(context_.max_transfer_bytes);
  }
  IdentifyData identify_namespace_data() const {
    return identify_namespace(storage().nbytes(), storage().writable());
  }

 private:
  void run(uint32_t thread);
  uint32_t sweep(uint32_t thread);
  bool has_unfinished() const;
  bool has_in_flight() const;
  int64_t next_due_ns() const;
  int64_t time_of_sweep() const;
  bool may_sleep_long() const;
  bool sleep(uint32_t thread, uint32_t epoch, int64_t idle_ns);
  bool retire(uint32_t epoch);
  // Relaxed: a thread that sees the begin of a launch late serves once more, and one that sees its
  // end late looks again within the sentinel's sleep.
  bool leaves_it_to_launches() const {
    return yields_ && launches_.load(std::memory_order_relaxed) != 0;
  }

  ControllerContext context_;
  const int64_t spin_ns_;
  const int64_t long_idle_ns_;
  const bool yields_;
  const uint32_t thread_count_;
  const bool retires_;
  std::unique_ptr<IoEngineFactory> engines_;
  std::vector<std::unique_ptr<QueueServer>> servers_;

  std::mutex life_;  // start and stop, one at a time
  std::vector<std::thread> threads_;
  std::atomic<bool> serving_{true};
  std::atomic<bool> stopping_{false};
  uint32_t* heartbeat_ = nullptr;  // of the queue pairs; null: none
  bool beats_ = false;

  const std::shared_ptr<Sleepers> sleepers_ = std::make_shared<Sleepers>();
  // Read at each sweep, so on another cache line than what launches change.
  alignas(128) std::atomic<uint32_t> launches_{0};
  std::atomic<bool> hears_launches_{false};
  std::atomic<bool> sleeps_long_{false};  // thread 0, perhaps without limit
  std::atomic<bool> retired_{false};      // the only thread has ended, or is about to
};

}  // namespace fw::native
