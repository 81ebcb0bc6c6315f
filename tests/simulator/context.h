// Stacks and switches between them, of which fibres are made.
//
// A stack has a page without access below it, so that an overflow is a fault and not a puzzle.
// On x86-64 a switch saves the six registers that a call preserves; elsewhere ucontext does it.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fw::simulator {

class Stack {
 public:
  static constexpr size_t kBytes = 128 << 10;
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  char* bottom() const { return base_; }
  char* top() const { return base_ + kBytes; }

 private:
  char* base_;
};

struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t registers = {};
#endif
};

// Makes `context` start `entry(argument)` on `stack`. `entry` must not return.
void prepare(Context& context, const Stack& stack, void (*entry)(void*), void* argument);

#if defined(__x86_64__)
extern "C" void fw_simulator_switch(void** save, void* load);
inline void switch_context(Context& from, const Context& to) {
  fw_simulator_switch(&from.stack_pointer, to.stack_pointer);
}
#else
void switch_context(Context& from, const Context& to);
#endif

}  // namespace fw::simulator
