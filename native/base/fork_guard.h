// Distinguishes a process from a child that was forked from it.
//
// Threads and io_urings do not survive fork(). So an object that owns them must refuse to work in
// the child, where it would wait for a thread that does not exist. A counter costs one relaxed load
// for each request; getpid() would be a system call.
#pragma once

#include <cstdint>

namespace fw::native {

// The number of fork() calls between the process that loaded the library and this one.
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
