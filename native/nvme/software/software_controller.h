// An NVMe controller in software: host threads that poll doorbells and serve one namespace.
//
// It owns its threads and the servers of its queue pairs; the rings and the memory that commands
// name belong to the caller and must outlive it. Threads that wait for completions may serve as
// well
// (`serve_some`, `fw_serve`), so that a wait turns into work. Idle threads sleep; one of them looks
// at the doorbells each millisecond, and `wake` is immediate.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fork_guard.h"
#include "nvme/software/identify.h"
#include "nvme/software/queue_server.h"

namespace fw::native {

struct ControllerOptions {
  uint32_t threads = 1;                   // 0: only callers of serve_some serve
  uint64_t page_bytes = 2 << 20;          // CC.MPS: a power of two, 4 KiB at least
  uint64_t max_transfer_bytes = 2 << 20;  // MDTS: a power of two, page-sized at least
  int64_t spin_ns = 100'000;  // how long a thread without work looks on before it sleeps
  bool yields = false;        // threads sleep while visitors serve: they would take their cores
  std::optional<SsdParameters> model =
      {};  // a drive whose latency and ceilings completions keep to
};

struct ControllerCounters {
  std::array<uint64_t, kCommandKinds> commands = {};
  uint64_t bytes_read = 0, bytes_written = 0, errors = 0, doorbell_reads = 0;
  uint64_t engine_operations = 0, engine_fallbacks = 0, kernel_enters = 0, held = 0;
  uint64_t sleeps = 0, wakes = 0;
  std::vector<std::pair<uint16_t, uint64_t>> queues;  // id, commands
};

class SoftwareController {
 public:
  // Throws invalid_argument when a size or address cannot be.
  SoftwareController(std::shared_ptr<Storage> storage, std::vector<QueuePairAddresses> queue_pairs,
                     std::vector<std::pair<uint64_t, uint64_t>> dma_regions,
                     const ControllerOptions& options);
  ~SoftwareController();
  SoftwareController(const SoftwareController&) = delete;
  SoftwareController& operator=(const SoftwareController&) = delete;

  // Both may be called twice. After `stop` no thread of the controller exists, nothing is in
  // flight, and every rung command has a completion where its CQ had room.
  void start();
  void stop();

  // Ends all sleep at once; call it before work that will ring doorbells is launched.
  void wake();

  // A visitor is a launch whose threads serve whenever they wait. What nobody waited for when the
  // last one leaves is for our own threads.
  void visitor_comes();
  void visitor_leaves();

  // Serves queue pairs from `first_queue` on until one had something to move. Returns how many
  // commands moved, 0 when there was nothing, -1 when the controller does not serve any more.
  int serve_some(uint32_t first_queue);

  bool in_forked_child() const { return fork_guard_.in_child(); }
  bool serving() const { return serving_.load(std::memory_order_acquire); }
  std::string engine_description() const {
    return engines_ == nullptr ? "memory" : engines_->description();
  }
  ControllerCounters counters() const;
  ErrorLog& errors() { return context_.errors; }
  const Storage& storage() const { return *context_.storage; }
  uint64_t max_transfer_bytes() const { return context_.max_transfer_bytes; }
  uint64_t page_bytes() const { return context_.page_bytes; }
  uint32_t thread_count() const { return thread_count_; }

  // What the Identify command returns for CNS 01h and 00h.
  IdentifyData identify_controller_data() const;
  IdentifyData identify_namespace_data() const;

 private:
  void run(uint32_t thread);
  void beat();
  uint32_t sweep(uint32_t thread);
  bool has_unfinished() const;
  bool has_in_flight() const;
  int64_t next_due_ns() const;
  int64_t time_of_sweep() const;
  bool sleep(uint32_t thread, int64_t idle_ns);
  // Relaxed: a thread that is late to see a visitor serves once more, and one that is late to see
  // it leave looks again within a sentinel's turn.
  bool leaves_it_to_visitors() const {
    return yields_ && visitors_.load(std::memory_order_relaxed) != 0;
  }

  ControllerContext context_;
  const int64_t spin_ns_;
  const bool yields_;
  const uint32_t thread_count_;
  std::unique_ptr<IoEngineFactory> engines_;
  std::vector<std::unique_ptr<QueueServer>> servers_;

  std::mutex life_;  // start and stop, one at a time
  std::vector<std::thread> threads_;
  std::atomic<bool> serving_{true};
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> stopped_{0};  // how often: what the heart sleeps on (a futex)
  uint32_t* heartbeat_ = nullptr;     // of the queue pairs; null: none

  // Sleep: threads wait for `epoch_` to change (a futex).
  alignas(128) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<uint64_t> wakes_{0};
  std::atomic<uint32_t> visitors_{0};
  ForkGuard fork_guard_;
};

}  // namespace fw::native

// For code that knows the controller only as an address: a launch of the CPU device, and its
// waiters
// (`serve_some`).
extern "C" __attribute__((visibility("default"))) int fw_serve(void* controller,
                                                               uint32_t first_queue);
extern "C" void fw_visitor_comes(void* controller);
extern "C" void fw_visitor_leaves(void* controller);
