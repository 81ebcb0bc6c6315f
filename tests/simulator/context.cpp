#include "context.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace fw::simulator {

Stack::Stack() {
  const size_t guard = size_t(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, guard + kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, guard, PROT_NONE);
  base_ = static_cast<char*>(memory) + guard;
}

Stack::~Stack() {
  const size_t guard = size_t(sysconf(_SC_PAGESIZE));
  munmap(base_ - guard, guard + kBytes);
}

#if defined(__x86_64__)

// The six registers that a call preserves go to the old stack and come from the new one. A new
// fibre's stack holds such a frame whose return address is the start below.
asm(R"(
  .text
  .globl fw_simulator_switch
  .type fw_simulator_switch, @function
fw_simulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size fw_simulator_switch, . - fw_simulator_switch
  .type fw_simulator_start, @function
fw_simulator_start:
  movq %r12, %rdi
  callq *%r13
  ud2
  .size fw_simulator_start, . - fw_simulator_start
)");
extern "C" void fw_simulator_start() __asm__("fw_simulator_start");

void prepare(Context& context, const Stack& stack, void (*entry)(void*), void* argument) {
  // As the switch pops them: r15, r14, r13, r12, rbx, rbp, return address; then two words, so that
  // the stack is aligned to 16 bytes where the start calls `entry`.
  auto* frame = reinterpret_cast<void**>(stack.top()) - 9;
  for (int i = 0; i < 9; ++i) frame[i] = nullptr;
  frame[2] = reinterpret_cast<void*>(entry);
  frame[3] = argument;
  frame[6] = reinterpret_cast<void*>(&fw_simulator_start);
  context.stack_pointer = frame;
}

#else

namespace {

// makecontext passes integers only.
void start(unsigned entry_high, unsigned entry_low, unsigned high, unsigned low) {
  const auto join = [](unsigned h, unsigned l) { return uintptr_t(uint64_t(h) << 32 | l); };
  reinterpret_cast<void (*)(void*)>(join(entry_high, entry_low))(
      reinterpret_cast<void*>(join(high, low)));
}

}  // namespace

void prepare(Context& context, const Stack& stack, void (*entry)(void*), void* argument) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack.bottom();
  context.registers.uc_stack.ss_size = Stack::kBytes;
  context.registers.uc_link = nullptr;
  const uint64_t e = reinterpret_cast<uintptr_t>(entry);
  const uint64_t a = reinterpret_cast<uintptr_t>(argument);
  makecontext(&context.registers, reinterpret_cast<void (*)()>(&start), 4, unsigned(e >> 32),
              unsigned(e), unsigned(a >> 32), unsigned(a));
}

void switch_context(Context& from, const Context& to) {
  swapcontext(&from.registers, &to.registers);
}

#endif

}  // namespace fw::simulator
