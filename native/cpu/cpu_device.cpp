#include "cpu/cpu_device.h"

#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "base/fault_guard.h"

namespace fw::native {
namespace {

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

}  // namespace

struct CpuPool::Workers {
  struct Job {
    const entry* kernel;
    const void* const* arguments;
    uint32_t count;
    const std::vector<Controller*>* controllers;
  };

  explicit Workers(uint32_t count) : count(count) {
    try {
      for (uint32_t i = 1; i < count; i++) threads.emplace_back([this, i] { work(i); });
    } catch (...) {  // the system refuses another thread
      join();
      throw;
    }
  }
  void join();
  void work(uint32_t index);
  void hand_out(const Job& job);
  void wait();
  static void run(const Job& job, uint32_t index);

  const uint32_t count;    // including the launching thread
  std::shared_mutex open;  // launches share it, so that `close` waits for them
  std::mutex launching;    // held by the one launch that uses the workers
  std::mutex mutex;        // guards what follows
  std::condition_variable start;
  std::condition_variable done;
  uint64_t generation = 0;
  uint32_t running = 0;
  bool closing = false;
  Job job = {};
  std::vector<std::thread> threads;
};

void CpuPool::Workers::run(const Job& job, uint32_t index) {
  if (index >= job.count) return;
  const GuardedVisit visit;
  // Serve the thread's own queue pair first, which `queue_of` in placement.cuh chooses. To serve
  // another thread's would take the lock, and the data's core, from the thread that waits for them.
  ServeList list{job.controllers, index, 2 * index};
  base::this_thread = {index, job.count, job.controllers->empty() ? nullptr : &serve_next, &list};
  job.kernel->run(job.arguments, &base::this_thread);
  base::this_thread = {};
}

void CpuPool::Workers::work(uint32_t index) {
  uint64_t seen = 0;
  while (true) {
    Job mine;
    {
      std::unique_lock lock(mutex);
      start.wait(lock, [&] { return closing || generation != seen; });
      if (closing) return;
      seen = generation;
      mine = job;
    }
    run(mine, index);
    std::lock_guard lock(mutex);
    if (--running == 0) done.notify_one();
  }
}

void CpuPool::Workers::join() {
  {
    std::lock_guard lock(mutex);
    closing = true;
    start.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
}

void CpuPool::Workers::hand_out(const Job& next) {
  std::lock_guard lock(mutex);
  job = next;
  generation++;
  running = count - 1;
  start.notify_all();
}

void CpuPool::Workers::wait() {
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return running == 0; });
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
  const Workers::Job job{&kernel, arguments, count, &controllers};
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
