#include "cpu/cpu_device.h"

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "base/fault_guard.h"
#include "flashwarp/base/atomic.cuh"

namespace fw::native {
namespace {

// How long a thread looks for work, or for the end of others', before it sleeps: about 50 us, which
// is what it takes to wake it.
constexpr uint32_t kSpins = 1000;
constexpr uint32_t kSpinsPerYield = 16;

// Pauses in a wait of a few microseconds. Yields now and then, because there may be more threads
// than cores.
void relax(uint32_t turn) {
  if (turn % kSpinsPerYield == kSpinsPerYield - 1) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The controllers of one launch, served in turn.
struct ServeList {
  const std::vector<Controller*>* controllers;
  uint32_t next;
  uint32_t first_queue;
};

int serve_next(void* argument) {
  ServeList& list = *static_cast<ServeList*>(argument);
  int moved = 0;
  for (std::size_t i = 0; i < list.controllers->size() && moved == 0; i++) {
    Controller* controller = (*list.controllers)[list.next++ % list.controllers->size()];
    moved = controller->serve_some(list.first_queue);
  }
  return moved;
}

void copy_cached(void* storage, base::host_copy* copies, uint32_t count) {
  static_cast<Storage*>(storage)->copy_cached(copies, count);
}

bool has_cached(void* storage, uint64_t offset, uint64_t bytes) {
  return static_cast<Storage*>(storage)->has_cached(offset, bytes);
}

// The namespace of the queue pair with this SQ, among those of a launch.
base::host_source find_source(void* argument, const void* sq) {
  const ServeList& list = *static_cast<ServeList*>(argument);
  for (Controller* controller : *list.controllers) {
    for (const QueuePairAddresses& pair : controller->queue_pairs()) {
      if (pair.sq != reinterpret_cast<uint64_t>(sq)) continue;
      Storage* storage = controller->host_storage();
      if (storage == nullptr) return {};
      return {&copy_cached, &has_cached, storage};
    }
  }
  return {};
}

}  // namespace

// The items that were taken of one thread's part of a launch, see `warp::item_loop`.
struct alignas(64) CpuPool::Taken {
  uint64_t items;
};

struct CpuPool::Workers {
  struct Job {
    const entry* kernel;
    const void* const* arguments;
    uint32_t count;
    const std::vector<Controller*>* controllers;
    Taken* taken;
  };

  explicit Workers(uint32_t count) : taken(count) {
    try {
      for (uint32_t i = 1; i < count; i++) threads.emplace_back([this] { work(); });
    } catch (...) {  // the system refuses another thread
      join();
      throw;
    }
  }
  void join();
  void work();
  bool begin(Job& mine, uint32_t& index);
  void hand_out(const Job& next);
  void wait();
  static void run(const Job& job, uint32_t index);

  std::shared_mutex open;  // launches share it, so that `close` waits for them
  std::mutex launching;    // held by the one launch that uses the workers
  std::vector<Taken> taken;
  std::atomic<uint32_t> generation{0};  // changes when there is something to do
  std::atomic<uint32_t> next{0};        // the index of the next worker that begins
  std::atomic<uint32_t> running{0};     // workers in the job
  std::mutex mutex;                     // guards changes of these, and what follows
  std::condition_variable start;
  std::condition_variable done;
  bool closing = false;
  Job job = {};
  std::vector<std::thread> threads;
};

void CpuPool::Workers::run(const Job& job, uint32_t index) {
  const GuardedVisit visit;
  // Serve the thread's own queue pair first, which `queue_of` in placement.cuh chooses. To serve
  // another thread's would take the lock, and the data's core, from the thread that waits for them.
  ServeList list{job.controllers, index, 2 * index};
  base::thread_context& here = base::this_thread;
  here = {index, job.count, job.controllers->empty() ? nullptr : &serve_next, &list};
  here.find = &find_source;
  here.find_argument = &list;
  here.taken = job.taken == nullptr ? nullptr : &job.taken->items;
  job.kernel->run(job.arguments, &here);
  here = {};
}

// Gives the calling worker a place in the job. Returns false if there is none: it has to wait.
bool CpuPool::Workers::begin(Job& mine, uint32_t& index) {
  std::unique_lock lock(mutex);
  const auto has_place = [&] { return closing || next < job.count; };
  if (!has_place()) {
    // A next launch often comes within the time that it would take to wake this thread.
    const uint32_t seen = generation;
    lock.unlock();
    for (uint32_t i = 0; i < kSpins && generation == seen; i++) relax(i);
    lock.lock();
    start.wait(lock, has_place);
  }
  if (closing) return false;
  mine = job;
  running++;
  index = next++;
  const bool more = next < job.count;
  lock.unlock();
  // Each wakes two, so that the launching thread need not wake them all.
  if (more) start.notify_one();
  if (more) start.notify_one();
  return true;
}

void CpuPool::Workers::work() {
  Job mine;
  uint32_t index;
  while (begin(mine, index)) {
    run(mine, index);
    std::lock_guard lock(mutex);
    if (--running == 0) done.notify_one();
  }
}

void CpuPool::Workers::join() {
  {
    std::lock_guard lock(mutex);
    closing = true;
    generation++;
    start.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
}

void CpuPool::Workers::hand_out(const Job& new_job) {
  for (uint32_t i = 0; i < new_job.count; i++) taken[i].items = 0;
  {
    std::lock_guard lock(mutex);
    job = new_job;
    next = 1;
    generation++;
  }
  start.notify_one();
}

// Waits until the job is done. If the kernel takes items, and this thread found none left, workers
// that have not begun need not begin.
void CpuPool::Workers::wait() {
  std::unique_lock lock(mutex);
  if (atomic::load_relaxed(&taken[0].items) != 0) next = job.count;
  // A worker counts itself as running before it takes the last place.
  const auto is_done = [&] { return next == job.count && running == 0; };
  lock.unlock();
  for (uint32_t i = 0; i < kSpins && !is_done(); i++) relax(i);
  lock.lock();
  done.wait(lock, is_done);
}

CpuPool::CpuPool(uint32_t threads)
    : thread_count_(threads), workers_(std::make_unique<Workers>(threads)) {}

CpuPool::~CpuPool() {
  close();
  // To destroy what threads of the parent wait on would wait for them.
  if (fork_guard_.in_child()) (void)workers_.release();
}

bool CpuPool::launch(const entry& kernel, const void* const* arguments, uint32_t threads,
                     const std::vector<Controller*>& controllers) {
  if (fork_guard_.in_child()) return false;
  const uint32_t count = threads == 0 || threads > thread_count_ ? thread_count_ : threads;
  std::shared_lock open(workers_->open);
  std::unique_lock one_launch(workers_->launching, std::defer_lock);
  if (count > 1) one_launch.lock();
  // `close` sets it while it holds `open` alone, and this thread shares `open`.
  if (workers_->closing) return false;
  Taken* const taken = count > 1 ? workers_->taken.data() : nullptr;
  const Workers::Job job{&kernel, arguments, count, &controllers, taken};
  for (Controller* controller : controllers) controller->launch_begins();
  if (count > 1) workers_->hand_out(job);
  Workers::run(job, 0);
  if (count > 1) workers_->wait();
  for (Controller* controller : controllers) controller->launch_ends();
  return true;
}

void CpuPool::close() {
  if (fork_guard_.in_child()) return;
  std::unique_lock no_launch(workers_->open);
  workers_->join();
}

}  // namespace fw::native
