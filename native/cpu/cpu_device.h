// The CPU device: a pool of threads that run kernels compiled by the host compiler.
//
// The launching thread takes part. So launches of one thread run beside others; of larger launches
// one runs at a time. Each thread is a warp of one lane. While a thread waits for I/O it serves the
// launch's controllers, which saves context switches. A child of fork() has none of the threads:
// there the pool refuses to launch, and does not touch what its threads wait on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/fork_guard.h"
#include "flashwarp/entry.cuh"
#include "nvme/controller.h"

namespace fw::native {

class CpuPool {
 public:
  explicit CpuPool(uint32_t threads);
  ~CpuPool();
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  // Runs a kernel on up to `threads` threads (0: all) and returns when all are done. `arguments`
  // has the address of one argument for each parameter, of the size in the entry. Returns false,
  // and runs nothing, if the pool is closed or in a forked child.
  bool launch(const entry& kernel, const void* const* arguments, uint32_t threads,
              const std::vector<Controller*>& controllers);
  // Waits for launches and joins the threads. Idempotent; does nothing in a forked child.
  void close();
  uint32_t threads() const { return thread_count_; }

 private:
  struct Taken;
  struct Workers;
  const uint32_t thread_count_;
  std::unique_ptr<Workers> workers_;
  ForkGuard fork_guard_;
};

}  // namespace fw::native
