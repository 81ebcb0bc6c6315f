#include "transfer/gatherer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "base/crc32c.h"
#include "base/fault_guard.h"
#include "storage/file_io.h"
#include "transfer/copy_ahead.h"

namespace fw::native {
namespace {

// A thread takes so many bytes at a time: 40 us of copying, against which an atomic is nothing.
constexpr uint64_t kGatherStepBytes = uint64_t(256) << 10;
// The same for a file, whose pieces take longer the fewer are in flight.
constexpr uint64_t kFileStepPieces = 512;
// Neighbours in the file are read together, up to this size.
constexpr uint64_t kRunBytesMax = uint64_t(1) << 20;

constexpr std::chrono::microseconds kReapPause{20};

// Copies pieces [begin, end). Returns the first that could not be read, or `end`.
uint64_t gather_range(uint64_t base, const Gatherer::Pieces& pieces, uint64_t begin, uint64_t end) {
  return copy_ahead(begin, end, pieces.piece_bytes, [&](uint64_t i) {
    return GuardedCopy{reinterpret_cast<void*>(pieces.buffer + i * pieces.piece_bytes),
                       reinterpret_cast<const void*>(base + uint64_t(pieces.offsets[i])),
                       pieces.piece_bytes, CopyResult::kFailed};
  });
}

}  // namespace

struct Gatherer::Task {
  Act act;
  uint64_t count = 0;
  uint64_t step = 0;
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> done{0};
  std::mutex lock;
  std::condition_variable ended;
  Outcome outcome;
  bool failed = false;
};

struct Gatherer::State {
  std::mutex lock;
  std::condition_variable work;
  std::deque<std::shared_ptr<Task>> tasks;
  bool stopping = false;
  std::vector<std::thread> threads;

  std::mutex engines_lock;
  std::unique_ptr<IoEngineFactory> factory;
  std::vector<std::unique_ptr<IoEngine>> engines;  // not in use
};

Gatherer::Gatherer(uint32_t threads, uint32_t in_flight)
    : threads_(threads), in_flight_(in_flight), state_(std::make_unique<State>()) {
  if (threads == 0) throw std::invalid_argument("a gatherer needs one thread at least");
  if (in_flight == 0) throw std::invalid_argument("a thread has one read in flight at least");
  try {
    for (uint32_t i = 1; i < threads; ++i) state_->threads.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {
    // Fewer threads than asked for are enough, but slower: the caller is one of them.
  }
}

Gatherer::~Gatherer() {
  if (fork_guard_.in_child()) {
    // The threads exist in the parent only; destroying what they wait on would wait for them.
    (void)state_.release();
    return;
  }
  stop();
}

void Gatherer::stop() {
  if (fork_guard_.in_child()) return;
  std::vector<std::thread> ending;
  {
    const std::lock_guard guard(state_->lock);
    state_->stopping = true;
    ending.swap(state_->threads);
  }
  state_->work.notify_all();
  for (std::thread& thread : ending) thread.join();
}

// A thread of the pool: helps with the oldest task that has parts left.
void Gatherer::serve() {
  const GuardedVisit visit;
  std::unique_lock guard(state_->lock);
  while (true) {
    state_->work.wait(guard, [this] { return state_->stopping || !state_->tasks.empty(); });
    if (state_->tasks.empty()) return;
    const std::shared_ptr<Task> task = state_->tasks.front();
    guard.unlock();
    work(*task);
    guard.lock();
    std::erase(state_->tasks, task);
  }
}

// Takes parts of a task until none is left.
void Gatherer::work(Task& task) {
  while (true) {
    // Relaxed: a part is only a number; the task itself was passed under the pool's lock.
    const uint64_t begin = task.next.fetch_add(task.step, std::memory_order_relaxed);
    if (begin >= task.count) return;
    const uint64_t end = std::min(task.count, begin + task.step);
    const Outcome outcome = task.act(begin, end);
    const std::lock_guard guard(task.lock);
    if (outcome.error != 0 && (!task.failed || outcome.piece < task.outcome.piece)) {
      task.outcome = outcome;
      task.failed = true;
    }
    // Under the lock: the caller may end the task as soon as it sees the last part done.
    if (task.done.fetch_add(end - begin) + (end - begin) == task.count) task.ended.notify_all();
  }
}

Gatherer::Outcome Gatherer::run(uint64_t count, uint64_t step, Act act) {
  if (fork_guard_.in_child()) throw std::runtime_error("the threads belong to the parent process");
  if (count == 0) return {};
  const auto task = std::make_shared<Task>();
  task->act = std::move(act);
  task->count = count;
  task->step = step;
  const bool alone = count <= step;
  {
    const std::lock_guard guard(state_->lock);
    if (state_->stopping) throw std::runtime_error("the threads were stopped");
    if (!alone) state_->tasks.push_back(task);
  }
  if (!alone) state_->work.notify_all();
  {
    const GuardedVisit visit;
    work(*task);
  }
  std::unique_lock guard(task->lock);
  task->ended.wait(guard, [&] { return task->done.load() == task->count; });
  const Outcome outcome = task->outcome;
  guard.unlock();
  const std::lock_guard pool(state_->lock);
  std::erase(state_->tasks, task);
  return outcome;
}

Gatherer::Outcome Gatherer::gather(uint64_t base, const Pieces& pieces, uint32_t* checksums) {
  if (!install_fault_guard()) return {ENOTSUP, 0};
  const uint64_t step = std::max<uint64_t>(1, kGatherStepBytes / pieces.piece_bytes);
  return run(pieces.count, step, [=](uint64_t begin, uint64_t end) -> Outcome {
    const uint64_t failed = gather_range(base, pieces, begin, end);
    if (failed != end) return Outcome{EFAULT, failed};
    // Of the copies, which this core has in its cache.
    for (uint64_t i = begin; checksums != nullptr && i < end; ++i) {
      const auto* piece = reinterpret_cast<const void*>(pieces.buffer + i * pieces.piece_bytes);
      checksums[i] = crc32c(0, piece, pieces.piece_bytes);
    }
    return Outcome{};
  });
}

// Files.

std::string Gatherer::file_engine() {
  give_engine(take_engine());
  const std::lock_guard guard(state_->engines_lock);
  return state_->factory->description();
}

std::unique_ptr<IoEngine> Gatherer::take_engine() {
  const std::lock_guard guard(state_->engines_lock);
  if (state_->factory == nullptr) {
    IoEngineFactory::Options options;
    options.engines = threads_;
    state_->factory = std::make_unique<IoEngineFactory>(std::move(options));
  }
  if (!state_->engines.empty()) {
    auto engine = std::move(state_->engines.back());
    state_->engines.pop_back();
    return engine;
  }
  return state_->factory->make(in_flight_);
}

void Gatherer::give_engine(std::unique_ptr<IoEngine> engine) {
  if (engine == nullptr) return;
  const std::lock_guard guard(state_->engines_lock);
  // Callers' threads need engines, too; more than the pool has are not kept.
  if (state_->engines.size() < threads_) state_->engines.push_back(std::move(engine));
}

Gatherer::Outcome Gatherer::read(int fd, const Pieces& pieces) {
  return run(pieces.count, kFileStepPieces, [=, this](uint64_t begin, uint64_t end) {
    return read_range(fd, pieces, begin, end);
  });
}

// One thread's part: keeps the engine full, and ends by blocking calls what came back short.
Gatherer::Outcome Gatherer::read_range(int fd, const Pieces& pieces, uint64_t begin, uint64_t end) {
  struct Run {
    uint64_t first = 0;
    uint64_t nbytes = 0;
  };
  std::vector<Run> runs;
  for (uint64_t i = begin; i < end; ++i) {
    const bool joins = !runs.empty() && runs.back().nbytes + pieces.piece_bytes <= kRunBytesMax &&
                       pieces.offsets[i] == pieces.offsets[i - 1] + int64_t(pieces.piece_bytes);
    if (joins) {
      runs.back().nbytes += pieces.piece_bytes;
    } else {
      runs.push_back({i, pieces.piece_bytes});
    }
  }
  Outcome outcome;
  const auto memory_of = [&](const Run& run) {
    return reinterpret_cast<std::byte*>(pieces.buffer + run.first * pieces.piece_bytes);
  };
  const auto end_run = [&](const Run& run, int32_t result) {
    const uint64_t moved = result > 0 ? uint64_t(result) : 0;
    const int error = read_fully(fd, memory_of(run) + moved, run.nbytes - moved,
                                 uint64_t(pieces.offsets[run.first]) + moved);
    const bool first = outcome.error == 0 || run.first < outcome.piece;
    if (error != 0 && first) outcome = {error, run.first};
  };
  std::unique_ptr<IoEngine> engine = take_engine();
  if (engine == nullptr) {
    for (const Run& each : runs) end_run(each, 0);
    return outcome;
  }
  IoResult results[kReapMax];
  size_t submitted = 0, ended = 0;
  while (ended < runs.size()) {
    for (; submitted < runs.size() && submitted - ended < in_flight_ && engine->free_slots() != 0;
         ++submitted) {
      const Run& next = runs[submitted];
      IoOperation operation;
      operation.kind = IoOperation::Kind::kRead;
      operation.fd = fd;
      operation.nbytes = uint32_t(next.nbytes);
      operation.offset = uint64_t(pieces.offsets[next.first]);
      operation.memory = memory_of(next);
      operation.token = submitted;
      engine->submit(operation);
    }
    engine->kick();
    const uint32_t count = engine->reap(results, kReapMax);
    for (uint32_t i = 0; i < count; ++i) end_run(runs[results[i].token], results[i].result);
    ended += count;
    if (count == 0) std::this_thread::sleep_for(kReapPause);
  }
  give_engine(std::move(engine));
  return outcome;
}

}  // namespace fw::native
