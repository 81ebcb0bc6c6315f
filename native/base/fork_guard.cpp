// Counts forks through pthread_atfork; see fork_guard.h.
#include "base/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace fw::native {
namespace {

std::atomic<uint32_t> generation{0};

// Relaxed: when the handler runs, the child has one thread.
void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

uint32_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace fw::native
