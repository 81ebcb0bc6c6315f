#include "cpu_device.h"

#include "fault_guard.h"
#include "flashwarp/base/platform.cuh"

// Defined by software_controller.cpp: serve once from the calling thread, from a queue pair on; and
// the begin and end of a launch whose threads do so.
extern "C" int fw_serve(void* controller, uint32_t first_queue);
extern "C" void fw_visitor_comes(void* controller);
extern "C" void fw_visitor_leaves(void* controller);

namespace fw::native {
namespace {

// The controllers of one launch, served in turn.
struct ServeList {
  std::vector<void*>* controllers;
  uint32_t next;
  uint32_t first_queue;
};

int serve_next(void* argument) {
  ServeList& list = *static_cast<ServeList*>(argument);
  int moved = 0;
  for (std::size_t i = 0; i < list.controllers->size() && moved == 0; i++) {
    moved = fw_serve((*list.controllers)[list.next++ % list.controllers->size()], list.first_queue);
  }
  return moved;
}

}  // namespace

CpuPool::CpuPool(uint32_t threads) : thread_count_(threads) {
  for (uint32_t i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

CpuPool::~CpuPool() { close(); }

void CpuPool::run(const Job& job, uint32_t index) {
  if (index >= job.count) return;
  const GuardedVisit visit;
  // Its own queue pair first, the one that `queue_of` in spread.cuh chooses: serving another
  // thread's would take the lock, and the data's core, from the thread that waits for them.
  ServeList list{job.controllers, index, 2 * index};
  base::this_thread = {index, job.count, job.controllers->empty() ? nullptr : &serve_next, &list};
  job.task.run(job.task.data);
  base::this_thread = {};
}

void CpuPool::work(uint32_t index) {
  uint64_t seen = 0;
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return closing_ || generation_ != seen; });
      if (closing_) return;
      seen = generation_;
      job = job_;
    }
    run(job, index);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_one();
  }
}

void CpuPool::launch(const CpuTask& task, uint32_t threads, std::vector<void*> controllers) {
  const uint32_t count = threads == 0 || threads > thread_count_ ? thread_count_ : threads;
  std::shared_lock open(open_);
  std::unique_lock one_launch(launch_mutex_, std::defer_lock);
  if (count > 1) one_launch.lock();
  Job job{task, count, &controllers};
  for (void* controller : controllers) fw_visitor_comes(controller);
  if (count > 1) {
    std::lock_guard lock(mutex_);
    job_ = job;
    generation_++;
    running_ = thread_count_ - 1;
    start_.notify_all();
  }
  run(job, 0);
  if (count > 1) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
  }
  for (void* controller : controllers) fw_visitor_leaves(controller);
}

void CpuPool::close() {
  std::unique_lock no_launch(open_);
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    start_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

}  // namespace fw::native
