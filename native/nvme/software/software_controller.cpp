// Threads, sleep and life cycle; see software_controller.h.
#include "nvme/software/software_controller.h"

#include <sys/prctl.h>

#include <algorithm>
#include <bit>
#include <system_error>
#include <utility>

#include "base/fault_guard.h"
#include "base/require.h"
#include "nvme/software/heart.h"

namespace fw::native {
namespace {

// A thread reads the clock once in this many idle sweeps.
constexpr uint32_t kSweepsPerClock = 16;

// How long the sentinel sleeps between looks at the doorbells: while only I/O is in flight (half of
// what a fast drive takes for a block), and while idle. A look costs a timer interrupt, up to 16 us
// in a virtual machine: 1.6 % of a core each 1 ms. After a long idle time one thread of the process
// looks for all controllers.
constexpr int64_t kInFlightNs = 50'000;
constexpr int64_t kSleepMinNs = 1'000;
constexpr int64_t kSentinelNs = 1'000'000;

// A thread that moves this many commands in a sweep wakes the others.
constexpr uint32_t kWakeOthersCommands = 64;

constexpr int64_t kSpinMaxNs = 1'000'000'000;
constexpr uint32_t kDepthMin = 2;
constexpr uint32_t kDepthMax = 1 << 16;
constexpr uint64_t kPageBytesMin = 4096;
constexpr uint64_t kTransferBytesMax = uint64_t(nvme::kLbaCountMax) * nvme::kLbaBytes;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void check_queue_pair(const QueuePairAddresses& pair) {
  require(pair.depth >= kDepthMin && pair.depth <= kDepthMax, "depth must be 2 to 65536");
  require(pair.sq != 0 && pair.sq % sizeof(nvme::command) == 0, "sq is not 64-byte aligned");
  require(pair.cq != 0 && pair.cq % sizeof(nvme::completion) == 0, "cq is not 16-byte aligned");
  require(pair.sq_doorbell != 0 && pair.sq_doorbell % 4 == 0, "sq_doorbell is not 4-byte aligned");
  require(pair.cq_doorbell != 0 && pair.cq_doorbell % 4 == 0, "cq_doorbell is not 4-byte aligned");
}

void check_options(const ControllerOptions& options) {
  require(options.threads <= 256, "at most 256 threads");
  require(std::has_single_bit(options.page_bytes) && options.page_bytes >= kPageBytesMin,
          "page_bytes must be a power of two, at least 4096");
  require(std::has_single_bit(options.max_transfer_bytes) &&
              options.max_transfer_bytes >= kPageBytesMin &&
              options.max_transfer_bytes <= kTransferBytesMax,
          "max_transfer_bytes must be a power of two from 4096 to 32 MiB");
  require(options.spin_ns >= 0 && options.spin_ns <= kSpinMaxNs, "spin_ns is 0 to one second");
}

}  // namespace

SoftwareController::SoftwareController(std::shared_ptr<Storage> storage,
                                       std::vector<QueuePairAddresses> pairs,
                                       std::vector<std::pair<uint64_t, uint64_t>> dma_regions,
                                       const ControllerOptions& options)
    : Controller(std::move(pairs)),
      context_{std::move(storage),
               DmaRegions(std::move(dma_regions)),
               options.page_bytes,
               options.max_transfer_bytes,
               {},
               options.model ? std::make_unique<ModelledDrive>(*options.model) : nullptr},
      spin_ns_(options.spin_ns),
      long_idle_ns_(options.long_idle_ns),
      yields_(options.yields),
      thread_count_(options.threads),
      retires_(options.yields && options.threads == 1) {
  require(context_.storage != nullptr, "storage is None");
  require(!queue_pairs().empty(), "at least one queue pair is needed");
  check_options(options);
  for (const QueuePairAddresses& pair : queue_pairs()) check_queue_pair(pair);
  const uint64_t heartbeat = queue_pairs().front().heartbeat;
  heartbeat_ = reinterpret_cast<uint32_t*>(heartbeat);
  for (const QueuePairAddresses& pair : queue_pairs()) {
    require(pair.heartbeat == heartbeat && pair.heartbeat % 4 == 0,
            "the queue pairs need one heartbeat, 4-byte aligned");
  }

  IoEngineFactory::Options engine_options;
  context_.storage->collect_files(engine_options.files);
  engine_options.nvme = context_.storage->takes_nvme_commands();
  engine_options.memory = context_.regions.list();
  engine_options.engines = uint32_t(queue_pairs().size());
  // A namespace in memory needs no engine, because it never waits; unless it is a mapped file whose
  // commands may name other memory too.
  const bool in_memory = context_.storage->mapped_base() != nullptr;
  const bool needs_engine =
      !engine_options.files.empty() && (!in_memory || !engine_options.memory.empty());
  if (needs_engine) engines_ = std::make_unique<IoEngineFactory>(std::move(engine_options));
  for (const QueuePairAddresses& pair : queue_pairs()) {
    std::unique_ptr<IoEngine> engine;
    if (needs_engine) {
      engine = engines_->make_later(pair.depth + PieceList::kCountMax);
      engine = context_.storage->decorate(std::move(engine));
    }
    servers_.push_back(std::make_unique<QueueServer>(pair, context_, std::move(engine)));
  }
}

SoftwareController::~SoftwareController() { stop(); }

void SoftwareController::start() {
  const std::lock_guard guard(life_);
  if (in_forked_child() || !threads_.empty()) return;
  stopping_.store(false, std::memory_order_relaxed);
  retired_.store(false, std::memory_order_relaxed);
  for (auto& server : servers_) server->reopen();
  serving_.store(true, std::memory_order_release);
  if (heartbeat_ != nullptr) {
    Heart::of_process().add(heartbeat_);
    beats_ = true;
  }
  for (uint32_t i = 0; i < thread_count_; ++i) threads_.emplace_back([this, i] { run(i); });
}

void SoftwareController::stop() {
  if (in_forked_child()) {
    // The threads exist in the parent only. Their objects here can be neither joined nor destroyed.
    (void)new std::vector<std::thread>(std::move(threads_));
    serving_.store(false, std::memory_order_release);
    return;
  }
  const std::lock_guard guard(life_);
  if (!serving()) return;
  stopping_.store(true, std::memory_order_release);
  sleepers_->wake();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  threads_.clear();
  if (std::exchange(beats_, false)) Heart::of_process().remove(heartbeat_);
  for (auto& server : servers_) server->close();
  serving_.store(false, std::memory_order_release);
}

void SoftwareController::wake() {
  sleepers_->wake();
  // Sequential, behind the new epoch: either the thread sees that and does not end, or this sees
  // that it has retired.
  if (!retired_.load(std::memory_order_seq_cst) || in_forked_child()) return;
  const std::lock_guard guard(life_);
  // It may have gone on by itself, or another caller has started it.
  if (stopping_.load(std::memory_order_relaxed) || !retired_.exchange(false)) return;
  std::thread& thread = threads_.front();
  if (thread.joinable()) thread.join();
  try {
    thread = std::thread([this] { run(0); });
  } catch (const std::system_error&) {
    retired_.store(true, std::memory_order_seq_cst);
  }
}

void SoftwareController::launch_begins() {
  // Sequential: either thread 0 sees the launch before it sleeps for long, or this sees that it
  // sleeps.
  launches_.fetch_add(1, std::memory_order_seq_cst);
  if (!yields_ && sleeps_long_.load(std::memory_order_seq_cst)) wake();
}

void SoftwareController::launch_ends() {
  if (launches_.fetch_sub(1, std::memory_order_seq_cst) != 1) return;
  if (has_unfinished()) wake();
}

void SoftwareController::hear_launches(bool all) {
  hears_launches_.store(all, std::memory_order_seq_cst);
  wake();
}

int SoftwareController::serve_some(uint32_t first_queue) {
  if (in_forked_child() || !serving()) return -1;
  const uint32_t count = uint32_t(servers_.size());
  const int64_t now_ns = time_of_sweep();
  uint32_t index = first_queue % count;
  for (uint32_t i = 0; i < count; ++i) {
    if (servers_[index]->has_work(now_ns)) {
      if (uint32_t moved = servers_[index]->serve()) return int(moved);
    }
    index = index + 1 == count ? 0 : index + 1;
  }
  return 0;
}

// A thread serves the queue pairs whose number modulo the threads is its own. While other threads
// sleep, it serves all.
uint32_t SoftwareController::sweep(uint32_t thread) {
  const bool alone = thread_count_ == 1 || sleepers_->any();
  const size_t step = alone ? 1 : thread_count_;
  const int64_t now_ns = time_of_sweep();
  uint32_t moved = 0;
  for (size_t i = alone ? 0 : thread; i < servers_.size(); i += step) {
    if (servers_[i]->has_work(now_ns)) moved += servers_[i]->serve();
  }
  if (alone && thread_count_ != 1 && moved >= kWakeOthersCommands) wake();
  return moved;
}

void SoftwareController::run(uint32_t thread) {
  const GuardedVisit visit;
  // The default slack of 50 us would double the sentinel's shortest sleep.
  prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
  int64_t idle_since = 0;
  uint32_t idle_sweeps = 0;
  uint32_t epoch = 0;
  while (!stopping_.load(std::memory_order_acquire)) {
    if (leaves_it_to_launches()) {
      if (!sleep(thread, sleepers_->epoch(), long_idle_ns_)) return;
      continue;
    }
    if (sweep(thread) != 0) {
      idle_sweeps = 0;
      idle_since = 0;
      continue;
    }
    relax();
    if (++idle_sweeps % kSweepsPerClock != 0) continue;
    const int64_t now = monotonic_ns();
    // A wake-up promises commands: idle time begins again, also for a thread that was awake.
    if (const uint32_t latest = sleepers_->epoch(); idle_since == 0 || latest != epoch) {
      epoch = latest;
      idle_since = now;
    }
    if (now - idle_since < spin_ns_ || next_due_ns() - now < kInFlightNs) continue;
    if (!sleep(thread, epoch, now - idle_since)) return;
    // After a sleep that ended by time, one idle sweep is enough to sleep again.
    idle_sweeps = kSweepsPerClock - 1;
  }
}

// Whether anything is rung, in flight or held.
bool SoftwareController::has_unfinished() const {
  return std::ranges::any_of(
      servers_, [](const auto& server) { return server->has_work(HeldCompletions::kNever - 1); });
}

// When the first held completion is due; HeldCompletions::kNever if none is held.
int64_t SoftwareController::next_due_ns() const {
  int64_t first = HeldCompletions::kNever;
  if (context_.drive == nullptr) return first;
  for (const auto& server : servers_) first = std::min(first, server->next_due_ns());
  return first;
}

// Only held completions need the time, so without a model no sweep reads the clock.
int64_t SoftwareController::time_of_sweep() const {
  return context_.drive == nullptr ? 0 : monotonic_ns();
}

bool SoftwareController::has_in_flight() const {
  return std::ranges::any_of(servers_, [](const auto& server) { return server->has_in_flight(); });
}

// Whether nothing needs a thread before a launch begins, or ends with something unfinished: both
// change the epoch, which the caller took before. `launch_ends` looks at the doorbells behind the
// launch's own stores, and this looks at them behind an epoch that it has changed.
bool SoftwareController::may_sleep_long() const {
  if (!hears_launches_.load(std::memory_order_seq_cst)) return false;
  if (launches_.load(std::memory_order_seq_cst) != 0) return yields_;
  return !has_unfinished();
}

// Puts a thread to sleep until a wake-up after `epoch`. Thread 0 also wakes by itself, to look at
// the doorbells, unless every launch tells it. Returns false if the thread has retired.
bool SoftwareController::sleep(uint32_t thread, uint32_t epoch, int64_t idle_ns) {
  // No look at the doorbells here: the sentinel sees one that was rung meanwhile at its next look.
  int64_t limit_ns = kSentinelNs;
  bool watched = false;
  bool retires = false;
  if (!leaves_it_to_launches()) {
    if (has_in_flight()) limit_ns = kInFlightNs;
    // Wakes early for a held completion, because sleeps end late.
    const int64_t due_ns = next_due_ns();
    if (due_ns != HeldCompletions::kNever) {
      limit_ns = std::clamp(due_ns - monotonic_ns() - kInFlightNs, kSleepMinNs, limit_ns);
    }
  }
  if (thread != 0) {
    limit_ns = 0;
  } else if (idle_ns >= long_idle_ns_) {
    sleeps_long_.store(true, std::memory_order_seq_cst);
    if (may_sleep_long()) {
      retires = retires_;
      limit_ns = retires ? std::max(long_idle_ns_, kSleepMinNs) : 0;
    } else if (beats_ && limit_ns == kSentinelNs) {
      watched = true;
      limit_ns = 0;
      Heart::of_process().watch(this, [this] {
        if (has_unfinished()) wake();
      });
    }
  }
  // `stop` changes the epoch after `stopping_`, so this sees it, or the sleep ends at once.
  const bool woken = stopping_.load(std::memory_order_acquire) || sleepers_->sleep(epoch, limit_ns);
  if (watched) Heart::of_process().unwatch(this);
  if (thread == 0) sleeps_long_.store(false, std::memory_order_relaxed);
  return woken || !retires || !retire(epoch);
}

// Lets the only thread end instead of sleeping on without limit. Returns false if it has been woken
// after `epoch`, and goes on.
bool SoftwareController::retire(uint32_t epoch) {
  // Sequential; see `wake`.
  retired_.store(true, std::memory_order_seq_cst);
  if (sleepers_->epoch() == epoch) return true;
  // If this fails, a caller of `wake` waits for the end of this thread, and starts another.
  return !retired_.exchange(false, std::memory_order_seq_cst);
}

ControllerProgress SoftwareController::progress() const {
  ControllerProgress sum;
  for (const auto& server : servers_) {
    const QueueCounters& from = server->counters();
    for (const Counter& count : from.commands) sum.commands += count.get();
    sum.waited += from.engine_operations.get() + from.held.get();
  }
  return sum;
}

Description SoftwareController::describe() const {
  Description result;
  result.add("kind", "software controller");
  result.add("engine", engine_description());
  result.add("threads", uint64_t(thread_count_));
  result.add("queue_pairs", uint64_t(queue_pairs().size()));
  result.add("page_bytes", context_.page_bytes);
  result.add("max_transfer_bytes", context_.max_transfer_bytes);
  return result;
}

ControllerCounters SoftwareController::counters() const {
  ControllerCounters sum;
  for (const auto& server : servers_) {
    const QueueCounters& from = server->counters();
    uint64_t commands = 0;
    for (size_t kind = 0; kind < kCommandKinds; ++kind) {
      sum.commands[kind] += from.commands[kind].get();
      commands += from.commands[kind].get();
    }
    sum.bytes_read += from.bytes_read.get();
    sum.bytes_written += from.bytes_written.get();
    sum.errors += from.errors.get();
    sum.doorbell_reads += from.doorbell_reads.get();
    sum.engine_operations += from.engine_operations.get();
    sum.engine_fallbacks += from.engine_fallbacks.get();
    sum.kernel_enters += from.kernel_enters.get();
    sum.held += from.held.get();
    sum.queues.emplace_back(server->id(), commands);
  }
  sum.sleeps = sleepers_->sleeps();
  sum.wakes = sleepers_->wakes();
  return sum;
}

}  // namespace fw::native
