// Construction, end, and what callers ask; see batch_engine.h.
#include "pipeline/batch_engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "base/require.h"
#include "pipeline/core.h"
#include "storage/composite_storage.h"

namespace fw::native::pipeline {
namespace {

constexpr uint32_t kWorkersMax = 256;
// How long `stop` waits for threads beyond an abort and the look that gives up on it.
constexpr std::chrono::seconds kStopSlack{2};
// Callers that wait look at least this often: a stream stores words without a wake-up.
constexpr int64_t kWaitLookNs = 200'000;
constexpr uint64_t kTransferBytesMax = 2 * kRunBytesMax;

// Commands may name any memory: a buffer of the caller is known with its batch only.
const std::pair<uint64_t, uint64_t> kAllMemory = {4096, ~uint64_t(0) - 8192};

int64_t cpu_ns(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

int64_t cpu_ns(std::thread& thread) {
  clockid_t clock;
  return pthread_getcpuclockid(thread.native_handle(), &clock) == 0 ? cpu_ns(clock) : 0;
}

void check_port(const PortOptions& port, const EngineOptions& options) {
  require(port.regions.slots() != 0, "a direction needs its regions");
  if (port.is_write) require(options.storage->writable(), "the storage is read-only");
  if (port.ring == 0) {
    require(!port.copies, "the engine's own stream needs a ring");
    return;
  }
  require(port.chunks >= 2, "a ring needs two chunks at least");
  require(port.chunk_bytes >= 4096 && port.chunk_bytes % 4096 == 0,
          "chunks are multiples of 4096 bytes");
  require(port.ring % 4096 == 0, "a ring begins at a multiple of 4096");
  require(port.filled != 0 && port.filled % 8 == 0 && port.emptied != 0 && port.emptied % 8 == 0,
          "a ring needs two words, 8-byte aligned");
}

const EngineOptions& checked(const EngineOptions& options, const StreamSide* stream) {
  require(options.storage != nullptr, "the storage is None");
  require(options.row_bytes >= 1 && options.row_bytes <= UINT32_MAX, "row_bytes is 1 to 2^32 - 1");
  require(options.rows <= options.storage->nbytes() / options.row_bytes,
          "the rows lie beyond the storage");
  require(options.workers.low >= 1 && options.workers.low <= options.workers.high &&
              options.workers.high <= kWorkersMax,
          "workers are 1 to 256, the least first");
  require(options.limit_ns > 0, "the time limit is positive");
  require(!options.ports.empty() && options.ports.size() <= 2, "one direction or both");
  require(options.ports.size() == 1 || options.ports[0].is_write != options.ports[1].is_write,
          "a direction is given twice");
  for (const PortOptions& port : options.ports) {
    check_port(port, options);
    require(!port.copies || stream != nullptr, "a stream side is needed for kernels' batches");
  }
  if (options.drives.empty()) return options;
  for (const PortOptions& port : options.ports) {
    require(!port.is_write || options.row_bytes % nvme::kLbaBytes == 0,
            "rows that are written to drives are whole blocks of 512 bytes");
  }
  require(options.drives.size() == 1 ||
              dynamic_cast<const PartitionedStorage*>(options.storage.get()) != nullptr,
          "several drives need a storage that is divided among them");
  return options;
}

}  // namespace

BatchEngine::Core::Core(EngineOptions given, std::unique_ptr<StreamSide> side)
    : options(std::move(given)),
      stream(std::move(side)),
      meter(options.workers, options.workers.high) {
  std::vector<std::pair<uint64_t, uint64_t>> memory;
  bool writes = false, direct = false;
  for (const PortOptions& each : options.ports) {
    auto port = std::make_unique<Port>();
    port->options = each;
    port->outcomes.resize(each.regions.slots());
    writes |= each.is_write;
    if (each.ring == 0) {
      direct = true;
    } else {
      memory.emplace_back(each.ring, each.chunks * each.chunk_bytes);
      port->step_bytes = options.row_bytes <= each.chunk_bytes
                             ? each.chunk_bytes / options.row_bytes * options.row_bytes
                             : each.chunk_bytes;
    }
    ports.push_back(std::move(port));
  }
  if (writes) {
    overlaps = std::make_unique<Overlaps>(options.row_bytes, options.rows);
  }
  if (direct) memory = {kAllMemory};
  const uint32_t count = options.workers.high;
  for (const DriveOptions& drive : options.drives) {
    drives.pairs.resize(count);
    std::vector<QueuePairAddresses> addresses;
    for (uint32_t i = 0; i < count; ++i) {
      drives.pairs[i].push_back(std::make_unique<HostQueuePair>(options.depth, uint16_t(i + 1)));
      addresses.push_back(drives.pairs[i].back()->addresses());
    }
    ControllerOptions settings;
    settings.threads = options.drive_threads;
    settings.max_transfer_bytes = kTransferBytesMax;
    settings.model = drive.model;
    drives.controllers.push_back(std::make_unique<SoftwareController>(
        drive.storage, std::move(addresses), std::vector{kAllMemory}, settings));
  }
  drives.served_by_workers = options.drive_threads == 0;
  if (drives.controllers.size() > 1) own_queues.resize(count);
  IoEngineFactory::Options engine;
  options.storage->collect_files(engine.files);
  engine.nvme = options.storage->takes_nvme_commands();
  if (!direct) engine.memory = memory;
  engine.engines = count;
  if (options.drives.empty() && !engine.files.empty()) {
    engines = std::make_unique<IoEngineFactory>(std::move(engine));
  }
  for (uint32_t i = 0; i < count; ++i) {
    Mover::Options mover;
    mover.storage = options.storage;
    mover.drives = options.drives.empty() ? nullptr : &drives;
    mover.engines = engines.get();
    mover.memory = memory;
    mover.index = i;
    mover.depth = options.depth;
    mover.row_bytes = uint32_t(options.row_bytes);
    mover.is_write = writes;
    movers.push_back(std::make_unique<Mover>(mover));
    sleepers.push_back(std::make_unique<Sleepers>());
  }
}

BatchEngine::BatchEngine(EngineOptions options, std::unique_ptr<StreamSide> stream) {
  checked(options, stream.get());
  core_ = std::make_unique<Core>(std::move(options), std::move(stream));
  Core& core = *core_;
  for (const auto& controller : core.drives.controllers) controller->start();
  core.over.resize(core.movers.size() + 1);
  core.used_ns.resize(core.over.size());
  const auto start = [&core](size_t index, auto act) {
    core.threads.emplace_back([&core, index, act] {
      act();
      const int64_t used_ns = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
      const std::lock_guard guard(core.life);
      core.used_ns[index] = used_ns;
      core.over[index] = true;
      core.a_thread_ended.notify_all();
    });
  };
  try {
    for (uint32_t i = 0; i < core.movers.size(); ++i) start(i, [&core, i] { core.work(i); });
    start(core.movers.size(), [&core] { core.poll(); });
  } catch (...) {
    // Without the polling thread, nobody else would end the workers.
    core.workers_end.store(true, std::memory_order_release);
    for (const auto& each : core.sleepers) each->wake();
    for (std::thread& thread : core.threads) thread.join();
    for (const auto& controller : core.drives.controllers) controller->stop();
    throw;
  }
}

BatchEngine::~BatchEngine() {
  if (fork_guard_.in_child()) {
    // The threads exist in the parent only.
    (void)core_.release();
    return;
  }
  stop();
  if (!leaked_.load(std::memory_order_acquire)) return;
  static std::mutex lock;
  static auto* const kept = new std::vector<std::unique_ptr<Core>>;
  const std::lock_guard guard(lock);
  kept->push_back(std::move(core_));
}

void BatchEngine::stop() {
  if (fork_guard_.in_child()) return;
  Core& core = *core_;
  const auto limit = std::chrono::nanoseconds(2 * core.options.abort_ns) + kStopSlack;
  std::vector<std::thread> ending;
  {
    std::unique_lock guard(core.life);
    if (core.stopping.exchange(true)) {
      core.a_thread_ended.wait_for(guard, limit, [&] { return core.threads.empty(); });
      return;
    }
    guard.unlock();
    core.polling.wake();
    guard.lock();
    const bool all = core.a_thread_ended.wait_for(guard, limit, [&] {
      return std::ranges::all_of(core.over, [](bool each) { return each; });
    });
    ending.swap(core.threads);
    if (!all) {
      // A thread is in a call that does not return, and will use all this if it ever does.
      for (std::thread& thread : ending) thread.detach();
      leaked_.store(true, std::memory_order_release);
      return;
    }
  }
  for (std::thread& thread : ending) thread.join();
  if (core.stream != nullptr) core.stream->stop();
  for (const auto& controller : core.drives.controllers) controller->stop();
  core.waiters.wake();
  core.a_thread_ended.notify_all();
}

void BatchEngine::let_go() {
  if (fork_guard_.in_child() || leaked_.load(std::memory_order_acquire)) return;
  Core& core = *core_;
  const std::lock_guard guard(core.life);
  if (!core.stopping || !core.threads.empty()) return;
  core.movers.clear();
  core.drives.controllers.clear();
  core.options.storage.reset();
}

Port& BatchEngine::port(bool is_write) const {
  for (const auto& port : core_->ports) {
    if (port->options.is_write == is_write) return *port;
  }
  throw std::invalid_argument(is_write ? "the engine does not write" : "the engine does not read");
}

uint64_t BatchEngine::submit(bool is_write, const int64_t* ids, uint64_t rows, uint64_t first,
                             uint64_t buffer) {
  if (in_forked_child()) throw std::runtime_error("the engine belongs to the parent process");
  Port& to = port(is_write);
  const batch::host_regions& regions = to.options.regions;
  if (rows > regions.rows_max) {
    throw std::invalid_argument("a batch of " + std::to_string(rows) + " rows, at most " +
                                std::to_string(regions.rows_max));
  }
  if (core_->stopping.load(std::memory_order_acquire)) {
    throw std::runtime_error("the engine was stopped");
  }
  uint64_t after = 0, ticket;
  for (const auto& other : core_->ports) {
    if (other.get() == &to) continue;
    const std::lock_guard guard(other->lock);
    after = other->submitted;
  }
  {
    const std::lock_guard guard(to.lock);
    ticket = to.submitted + 1;
    if (!regions.is_free(ticket)) return 0;
    to.submitted = ticket;
  }
  if (ids != nullptr) std::memcpy(regions.list(regions.slot(ticket)), ids, rows * sizeof(int64_t));
  regions.submit(
      ticket, {0, buffer, rows, first, ids == nullptr ? batch::kSequence : batch::kRows, 0, after});
  announce(is_write, ticket);
  return ticket;
}

void BatchEngine::announce(bool is_write, uint64_t ticket) {
  Port& to = port(is_write);
  uint64_t seen = to.expected.load(std::memory_order_relaxed);
  while (seen < ticket && !to.expected.compare_exchange_weak(seen, ticket)) {
  }
  core_->polling.wake();
}

void BatchEngine::kernels_begin() {
  core_->kernels.fetch_add(1, std::memory_order_relaxed);
  core_->polling.wake();
}

void BatchEngine::kernels_end() { core_->kernels.fetch_sub(1, std::memory_order_relaxed); }

bool BatchEngine::ended(bool is_write, uint64_t ticket) const {
  return port(is_write).options.regions.ended(ticket);
}

bool BatchEngine::wait(bool is_write, uint64_t ticket, int64_t limit_ns) {
  const Port& of = port(is_write);
  const int64_t start_ns = monotonic_ns();
  while (true) {
    const uint32_t epoch = core_->waiters.epoch();
    if (of.options.regions.ended(ticket)) return true;
    const int64_t waited = monotonic_ns() - start_ns;
    if (waited >= limit_ns) return false;
    core_->waiters.sleep(epoch, std::clamp(limit_ns - waited, int64_t(1), kWaitLookNs));
  }
}

std::optional<Outcome> BatchEngine::outcome(bool is_write, uint64_t ticket) {
  Port& of = port(is_write);
  const std::lock_guard guard(of.lock);
  const Outcome& found = of.outcomes[of.options.regions.slot(ticket)];
  return found.ticket == ticket && ticket != 0 ? std::optional(found) : std::nullopt;
}

uint64_t BatchEngine::step_bytes(bool is_write) const { return port(is_write).step_bytes; }

std::vector<ErrorRecord> BatchEngine::take_errors() {
  std::vector<ErrorRecord> all;
  const auto append = [&](std::vector<ErrorRecord> more) {
    for (ErrorRecord& each : more) all.push_back(std::move(each));
  };
  const std::lock_guard guard(core_->life);  // against `let_go`
  for (const auto& mover : core_->movers) append(mover->take_errors());
  for (const auto& controller : core_->drives.controllers) append(controller->take_errors());
  return all;
}

EngineStats BatchEngine::stats() {
  EngineStats stats;
  Core& core = *core_;
  core.meter.read(stats);
  for (uint32_t i = 0; i < 2; ++i) {
    stats.batches[i] = core.batches_ended[i].load(std::memory_order_relaxed);
    stats.rows[i] = core.rows_ended[i].load(std::memory_order_relaxed);
    stats.nbytes[i] = core.bytes_ended[i].load(std::memory_order_relaxed);
    stats.failed[i] = core.rows_failed[i].load(std::memory_order_relaxed);
  }
  stats.runs = core.runs.load(std::memory_order_relaxed);
  stats.overdue = core.overdue.load(std::memory_order_relaxed);
  stats.polling_sleeps = core.polling.sleeps();
  stats.engine = core.engines == nullptr ? "memory" : core.engines->description();
  const std::lock_guard guard(core.life);
  for (size_t i = 0; i < core.over.size(); ++i) {
    const int64_t used_ns = core.over[i] ? core.used_ns[i] : cpu_ns(core.threads[i]);
    (i + 1 == core.over.size() ? stats.polling_cpu_ns : stats.worker_cpu_ns) += used_ns;
  }
  return stats;
}

uint64_t BatchEngine::decision_count() const { return core_->meter.decision_count(); }

}  // namespace fw::native::pipeline
