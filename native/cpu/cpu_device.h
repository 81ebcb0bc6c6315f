// The CPU device: a pool of threads that run kernels compiled by the host compiler.
//
// The launching thread works along, so a launch of one thread runs beside others; of those with
// more there is one at a time. Each thread is a warp of one lane. While a thread waits for I/O it
// serves the controllers that it was given, so that a wait turns into work instead of a
// context switch. A child of fork() has none of the threads: there the pool refuses to launch, and
// leaves what its threads wait on alone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/fork_guard.h"
#include "nvme/controller.h"

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

  // Runs `task` on up to `threads` threads (0: all) and returns when all are done. False, with
  // nothing run, once the pool is closed or in a forked child.
  bool launch(const CpuTask& task, uint32_t threads, std::vector<Controller*> controllers);
  // Waits for launches and joins the threads. Idempotent; nothing to do in a forked child.
  void close();
  uint32_t threads() const { return thread_count_; }

 private:
  struct Workers;
  const uint32_t thread_count_;
  std::unique_ptr<Workers> workers_;
  ForkGuard fork_guard_;
};

}  // namespace fw::native
