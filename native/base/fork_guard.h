// Distinguishes a process from a child that was forked from it.
//
// Threads and io_urings do not survive fork(). So an object that owns them must refuse to work in
// the child, where it would wait for a thread that does not exist. A counter costs one relaxed load
// for each request; getpid() would be a system call.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace fw::native {

inline std::atomic<uint32_t> forks{0};

// The number of fork() calls between the process that loaded the library and this one. All accesses
// are relaxed: when the handler runs, the child has one thread.
inline uint32_t fork_generation() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  return forks.load(std::memory_order_relaxed);
}

// Remembers the process in which it was built.
class ForkGuard {
 public:
  ForkGuard() : generation_(fork_generation()) {}
  bool in_child() const { return generation_ != fork_generation(); }

 private:
  uint32_t generation_;
};

}  // namespace fw::native
