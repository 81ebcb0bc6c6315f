// The CPU device: a pool of threads that run kernels compiled by the host compiler.
//
// The launching thread works along, so a launch of one thread runs beside others; of those with
// more there is one at a time. Each thread is a warp of one lane. While a thread waits for I/O it
// serves the software controllers that it was given, so that a wait turns into work instead of a
// context switch.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

namespace fw::native {

// What every thread of a launch runs; base::this_thread says which thread it is.
struct CpuTask {
  void (*run)(const void* data);
  const void* data;
};

class CpuPool {
 public:
  explicit CpuPool(uint32_t threads);
  ~CpuPool();
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  // Runs `task` on up to `threads` threads (0: all) and returns when all are done.
  void launch(const CpuTask& task, uint32_t threads, std::vector<void*> controllers);
  // Joins the threads. Idempotent.
  void close();
  uint32_t threads() const { return thread_count_; }

 private:
  struct Job {
    CpuTask task;
    uint32_t count;
    std::vector<void*>* controllers;
  };
  void work(uint32_t index);
  static void run(const Job& job, uint32_t index);

  uint32_t thread_count_;
  std::shared_mutex open_;   // shared by launches, so that `close` waits for them
  std::mutex launch_mutex_;  // one launch of the workers at a time
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  uint64_t generation_ = 0;
  uint32_t running_ = 0;
  bool closing_ = false;
  Job job_ = {};
  std::vector<std::thread> workers_;
};

}  // namespace fw::native
