// Tells a process apart from a child that was forked from it.
//
// Threads and io_uring contexts do not survive fork(), so an object that owns them must refuse to
// work in the child instead of waiting for a thread that is not there. Comparing a counter costs
// one relaxed load; getpid() would cost a system call on every request.
#pragma once

#include <cstdint>

namespace fw::native {

// Number of fork() calls between the first process that loaded the library and this one.
uint32_t fork_generation();

// Remembers the process in which it was built.
class ForkGuard {
 public:
  ForkGuard() : generation_(fork_generation()) {}
  bool in_child() const { return generation_ != fork_generation(); }

 private:
  uint32_t generation_;
};

}  // namespace fw::native
