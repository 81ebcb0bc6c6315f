// The two engines; see io_engine.h.
#include "io/io_engine.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>

#include "base/fork_guard.h"
#include "io/io_uring.h"
#include "io/nvme_command.h"

namespace fw::native {
namespace {

// The kernel's bound of a registered buffer, here for all rings together, because pinning takes
// time and counts against the memory lock limit.
constexpr uint64_t kRegisteredBytesMax = uint64_t(1) << 30;

// Enough to keep a virtual disk busy: 130 k reads/s at 120 us each are 16 in flight.
constexpr uint32_t kPoolThreads = 16;

// The kernel's bound of a ring's entries.
constexpr uint32_t kRingEntriesMax = 32768;

constexpr uint64_t kCancelToken = ~uint64_t(0);

// Marks the tokens of NVMe commands, whose results the kernel gives as a status.
constexpr uint64_t kNvmeBit = uint64_t(1) << 63;

NvmeCommand nvme_command_of(const IoOperation& operation) {
  if (operation.kind == IoOperation::Kind::kSync) return nvme_flush();
  return nvme_transfer(*operation.nvme, operation.kind == IoOperation::Kind::kWrite,
                       operation.offset, operation.memory, operation.nbytes, operation.durable);
}

// Only pwritev2 can write durably in one call. If it is not available, make two calls.
long write_once(const IoOperation& operation) {
  const iovec source = {operation.memory, operation.nbytes};
  const long written = syscall(SYS_pwritev2, operation.fd, &source, 1, operation.offset, 0,
                               operation.durable ? RWF_DSYNC : 0);
  const bool refused = errno == ENOSYS || errno == EPERM || errno == EOPNOTSUPP;
  if (written >= 0 || !refused) return written;
  const long result =
      syscall(SYS_pwrite64, operation.fd, operation.memory, operation.nbytes, operation.offset);
  return result >= 0 && operation.durable && fdatasync(operation.fd) != 0 ? -1 : result;
}

int32_t run_blocking(const IoOperation& operation) {
  if (operation.nvme != nullptr) {
    const int error = run_nvme(*operation.nvme, nvme_command_of(operation));
    return error == 0 ? kAllMoved : -error;
  }
  long result = 0;
  switch (operation.kind) {
    case IoOperation::Kind::kRead:
      result =
          syscall(SYS_pread64, operation.fd, operation.memory, operation.nbytes, operation.offset);
      break;
    case IoOperation::Kind::kWrite:
      result = write_once(operation);
      break;
    case IoOperation::Kind::kSync:
      result = fdatasync(operation.fd);
      break;
  }
  return result < 0 ? -errno : int32_t(result);
}

class UringEngine final : public IoEngine {
 public:
  UringEngine(uint32_t capacity, std::shared_ptr<std::atomic<int>> refusal)
      : IoEngine(capacity), refusal_(std::move(refusal)) {}

  int open(const IoEngineFactory::Options& options) {
    if (int error = ring_.open(capacity_, options.nvme)) return error;
    register_files(options.files);
    register_memory(options);
    return 0;
  }

  void submit(const IoOperation& operation) override {
    ++in_flight_;
    io_uring_sqe* entry = broken_ ? nullptr : ring_.prepare();
    if (entry == nullptr && !broken_) {
      kick();
      if (!broken_) entry = ring_.prepare();
    }
    if (entry == nullptr) return refuse(operation.token);
    fill(entry, operation);
  }

  void kick() override {
    if (ring_.unsubmitted() == 0) return;
    ++kernel_enters_;
    const int error = ring_.submit();
    // EAGAIN and EBUSY mean that the kernel is short of memory, or that results wait to be reaped.
    // The entries stay prepared, and the next kick submits them again.
    if (error == 0 || error == EAGAIN || error == EBUSY) return;
    // A filter of system calls was installed after the ring was made, or its descriptor was closed.
    // The queue's server then moves itself what the kernel has not taken. Operations that it has
    // taken still give results.
    broken_ = true;
    refusal_->store(error, std::memory_order_relaxed);
    ring_.withdraw([this](uint64_t token) {
      if (token != kCancelToken) refuse(token & ~kNvmeBit);
    });
  }

  uint32_t reap(IoResult* results, uint32_t limit) override {
    uint32_t count = 0;
    while (!refused_.empty() && count < limit) {
      results[count++] = refused_.back();
      refused_.pop_back();
    }
    ring_.reap(limit - count, [&](uint64_t token, int32_t result) {
      if (token != kCancelToken) results[count++] = result_of(token, result);
    });
    in_flight_ -= count;
    return count;
  }

  void cancel_all() override {
    kick();
    io_uring_sqe* entry = broken_ ? nullptr : ring_.prepare();
    if (entry == nullptr) return;
    entry->opcode = IORING_OP_ASYNC_CANCEL;
    entry->cancel_flags = IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL;
    entry->user_data = kCancelToken;
    kick();
    ring_.poke();
  }

 private:
  static IoResult result_of(uint64_t token, int32_t result) {
    if ((token & kNvmeBit) == 0) return {token, result};
    if (result > 0) result = -error_of_status(uint32_t(result));
    return {token & ~kNvmeBit, result == 0 ? kAllMoved : result};
  }

  void register_files(const std::vector<int>& files) {
    if (files.empty() || ring_.register_files(files) != 0) return;
    for (size_t i = 0; i < files.size(); ++i) {
      if (size_t(files[i]) >= file_index_.size()) file_index_.resize(files[i] + 1, -1);
      file_index_[files[i]] = int32_t(i);
    }
  }

  // Registered memory saves the kernel a page walk for each transfer. It is optional, so a refusal
  // (memory lock limit, device memory) is no error.
  void register_memory(const IoEngineFactory::Options& options) {
    uint64_t total = 0;
    for (const auto& [address, nbytes] : options.memory) total += nbytes;
    if (total == 0 || total > kRegisteredBytesMax / std::max(1u, options.engines)) return;
    if (ring_.register_buffers(options.memory) == 0) buffers_ = options.memory;
  }

  int32_t buffer_index(const IoOperation& operation) const {
    const auto address = reinterpret_cast<uint64_t>(operation.memory);
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const uint64_t start = address - buffers_[i].first;
      if (start < buffers_[i].second && operation.nbytes <= buffers_[i].second - start) {
        return int32_t(i);
      }
    }
    return -1;
  }

  void fill(io_uring_sqe* entry, const IoOperation& operation) {
    entry->user_data = operation.token;
    entry->fd = operation.fd;
    if (size_t(operation.fd) < file_index_.size() && file_index_[operation.fd] >= 0) {
      entry->fd = file_index_[operation.fd];
      entry->flags = IOSQE_FIXED_FILE;
    }
    if (operation.nvme != nullptr) {
      entry->user_data |= kNvmeBit;
      return fill_nvme(entry, *operation.nvme, nvme_command_of(operation));
    }
    if (operation.kind == IoOperation::Kind::kSync) {
      entry->opcode = IORING_OP_FSYNC;
      entry->fsync_flags = IORING_FSYNC_DATASYNC;
      return;
    }
    const bool is_write = operation.kind == IoOperation::Kind::kWrite;
    const int32_t buffer = buffer_index(operation);
    entry->opcode = is_write ? IORING_OP_WRITE : IORING_OP_READ;
    if (buffer >= 0) {
      entry->opcode = is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
      entry->buf_index = uint16_t(buffer);
    }
    entry->addr = reinterpret_cast<uint64_t>(operation.memory);
    entry->len = operation.nbytes;
    entry->off = operation.offset;
    entry->rw_flags = operation.durable ? RWF_DSYNC : 0;
  }

  // The kernel takes no more entries: gives the operation a result that can be retried.
  void refuse(uint64_t token) { refused_.push_back({token, -EAGAIN}); }

  IoUring ring_;
  bool broken_ = false;  // the kernel takes no entries any more
  const std::shared_ptr<std::atomic<int>> refusal_;
  std::vector<int32_t> file_index_;  // by descriptor; -1 where it is not registered
  std::vector<std::pair<uint64_t, uint64_t>> buffers_;
  std::vector<IoResult> refused_;
};

}  // namespace

// Threads that run blocking transfers for the engines of one controller.
class IoThreadPool {
 public:
  // The results of one engine of threads.
  struct Inbox {
    std::mutex lock;
    std::vector<IoResult> results;
    void put(IoResult result) {
      const std::lock_guard guard(lock);
      results.push_back(result);
    }
  };

  explicit IoThreadPool(uint32_t threads) {
    try {
      for (uint32_t i = 0; i < threads; ++i) state_->threads.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      // Fewer threads than asked for are enough, but slower. None at all is an error.
      if (state_->threads.empty()) throw;
    }
  }

  ~IoThreadPool() {
    if (fork_guard_.in_child()) {
      // The threads exist in the parent only; destroying what they wait on would wait for them.
      (void)state_.release();
      return;
    }
    {
      const std::lock_guard guard(state_->lock);
      state_->stopping = true;
    }
    state_->ready.notify_all();
    for (std::thread& thread : state_->threads) thread.join();
  }

  void push(const IoOperation& operation, std::shared_ptr<Inbox> inbox) {
    {
      const std::lock_guard guard(state_->lock);
      state_->jobs.push_back({operation, std::move(inbox)});
    }
    state_->ready.notify_one();
  }

  // Ends jobs of `inbox` that have not started, with -ECANCELED.
  void cancel(const std::shared_ptr<Inbox>& inbox) {
    const std::lock_guard guard(state_->lock);
    std::erase_if(state_->jobs, [&](const Job& job) {
      if (job.inbox != inbox) return false;
      inbox->put({job.operation.token, -ECANCELED});
      return true;
    });
  }

 private:
  struct Job {
    IoOperation operation;
    std::shared_ptr<Inbox> inbox;
  };
  struct State {
    std::mutex lock;
    std::condition_variable ready;
    std::deque<Job> jobs;
    bool stopping = false;
    std::vector<std::thread> threads;
  };

  void run() {
    std::unique_lock guard(state_->lock);
    while (true) {
      state_->ready.wait(guard, [this] { return state_->stopping || !state_->jobs.empty(); });
      if (state_->jobs.empty()) return;
      const Job job = std::move(state_->jobs.front());
      state_->jobs.pop_front();
      guard.unlock();
      job.inbox->put({job.operation.token, run_blocking(job.operation)});
      guard.lock();
    }
  }

  std::unique_ptr<State> state_ = std::make_unique<State>();
  ForkGuard fork_guard_;
};

namespace {

class ThreadedEngine final : public IoEngine {
 public:
  ThreadedEngine(uint32_t capacity, IoThreadPool& pool)
      : IoEngine(capacity), pool_(pool), inbox_(std::make_shared<IoThreadPool::Inbox>()) {
    inbox_->results.reserve(capacity);
  }

  void submit(const IoOperation& operation) override {
    ++in_flight_;
    pool_.push(operation, inbox_);
  }

  void kick() override {}

  uint32_t reap(IoResult* results, uint32_t limit) override {
    const std::lock_guard guard(inbox_->lock);
    auto& waiting = inbox_->results;
    const uint32_t count = std::min(limit, uint32_t(waiting.size()));
    std::copy(waiting.end() - count, waiting.end(), results);
    waiting.resize(waiting.size() - count);
    in_flight_ -= count;
    return count;
  }

  void cancel_all() override { pool_.cancel(inbox_); }

 private:
  IoThreadPool& pool_;
  const std::shared_ptr<IoThreadPool::Inbox> inbox_;
};

// Most queue pairs of an idle array, and of one in the page cache, never have an operation.
class LaterEngine final : public IoEngine {
 public:
  LaterEngine(uint32_t capacity, IoEngineFactory& factory)
      : IoEngine(capacity), factory_(factory) {}

  void submit(const IoOperation& operation) override {
    if (!asked_) engine_ = factory_.make(capacity_);
    asked_ = true;
    ++in_flight_;
    if (engine_ == nullptr) {
      refused_.push_back({operation.token, -EAGAIN});
    } else {
      engine_->submit(operation);
    }
  }

  void kick() override {
    if (engine_ == nullptr) return;
    engine_->kick();
    kernel_enters_ = engine_->kernel_enters();
  }

  uint32_t reap(IoResult* results, uint32_t limit) override {
    uint32_t count = engine_ == nullptr ? 0 : engine_->reap(results, limit);
    for (; !refused_.empty() && count < limit; refused_.pop_back()) {
      results[count++] = refused_.back();
    }
    in_flight_ -= count;
    return count;
  }

  void cancel_all() override {
    if (engine_ != nullptr) engine_->cancel_all();
  }

 private:
  IoEngineFactory& factory_;
  bool asked_ = false;
  std::unique_ptr<IoEngine> engine_;
  std::vector<IoResult> refused_;
};

}  // namespace

IoEngineFactory::IoEngineFactory(Options options) : options_(std::move(options)) {
  const char* forced = std::getenv("FLASHWARP_IO_ENGINE");
  if (forced != nullptr && std::string_view(forced) == "threads") {
    description_ = "thread-pool: FLASHWARP_IO_ENGINE=threads";
    return;
  }
  const std::string refusal = probe_io_uring();
  use_io_uring_ = refusal.empty();
  description_ = use_io_uring_ ? "io_uring" : "thread-pool: " + refusal;
}

IoEngineFactory::~IoEngineFactory() = default;

std::string IoEngineFactory::description() const {
  const std::lock_guard guard(mutex_);
  const int error = refusal_->load(std::memory_order_relaxed);
  if (error == 0) return description_;
  return description_ +
         ", then by blocking calls: " + describe_io_uring_refusal("io_uring_enter", error);
}

std::unique_ptr<IoEngine> IoEngineFactory::make_threaded(uint32_t capacity) {
  try {
    if (pool_ == nullptr) pool_ = std::make_unique<IoThreadPool>(kPoolThreads);
  } catch (const std::system_error& error) {
    description_ = std::string("blocking calls: no thread can be started: ") + error.what();
    return nullptr;
  }
  return std::make_unique<ThreadedEngine>(capacity, *pool_);
}

std::unique_ptr<IoEngine> IoEngineFactory::make(uint32_t capacity) {
  capacity = std::min(capacity, kRingEntriesMax);
  const std::lock_guard guard(mutex_);
  if (use_io_uring_) {
    auto engine = std::make_unique<UringEngine>(capacity, refusal_);
    const int error = engine->open(options_);
    if (error == 0) return engine;
    use_io_uring_ = false;
    description_ = "thread-pool: " + describe_io_uring_refusal("io_uring_setup", error);
    if (options_.nvme && error == EINVAL) description_ += " (NVMe commands need Linux 5.19)";
  }
  return make_threaded(capacity);
}

std::unique_ptr<IoEngine> IoEngineFactory::make_later(uint32_t capacity) {
  return std::make_unique<LaterEngine>(std::min(capacity, kRingEntriesMax), *this);
}

}  // namespace fw::native
