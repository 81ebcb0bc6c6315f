// The SIGBUS handler and the copies it watches over; see fault_guard.h.
#include "base/fault_guard.h"

#include <pthread.h>

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdint>

#include "flashwarp/base/copy.cuh"

namespace fw::native {
namespace {

// A thread's current copy: its source, and where to resume after a fault.
struct Guard {
  sigjmp_buf resume;
  uintptr_t begin;
  uintptr_t end;
};

// Initial-exec, because the handler must not allocate in a thread that has never copied.
thread_local Guard* active __attribute__((tls_model("initial-exec"))) = nullptr;

struct sigaction previous;

bool is_page_fault(const siginfo_t& info) {
  return info.si_code == BUS_ADRERR || info.si_code == BUS_OBJERR || info.si_code == BUS_MCEERR_AR;
}

// Passes a signal of other code to the handler that was installed before.
void pass_on(int signal, siginfo_t* info, void* context) {
  if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler == SIG_IGN && !is_page_fault(*info)) return;
  if (previous.sa_handler != SIG_IGN && previous.sa_handler != SIG_DFL) {
    return previous.sa_handler(signal);
  }
  // The default action: after the return the instruction faults again, and the process ends there,
  // with the address in its core. A signal that was sent has no instruction, so raise it again.
  struct sigaction end = {};
  end.sa_handler = SIG_DFL;
  sigaction(signal, &end, nullptr);
  if (!is_page_fault(*info)) raise(signal);
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  Guard* guard = active;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (guard == nullptr || !is_page_fault(*info) || address < guard->begin ||
      address >= guard->end) {
    return pass_on(signal, info, context);
  }
  sigset_t ours;
  sigemptyset(&ours);
  sigaddset(&ours, signal);
  pthread_sigmask(SIG_UNBLOCK, &ours, nullptr);
  siglongjmp(guard->resume, 1);
}

bool install() {
  struct sigaction ours = {};
  ours.sa_sigaction = &on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  // Read `previous` first, because another thread's fault may come at once.
  return sigaction(SIGBUS, nullptr, &previous) == 0 && sigaction(SIGBUS, &ours, nullptr) == 0;
}

bool mask_blocks_signal() {
  sigset_t blocked;
  return pthread_sigmask(SIG_SETMASK, nullptr, &blocked) != 0 || sigismember(&blocked, SIGBUS) != 0;
}

void copy_once(char* target, const char* source, size_t nbytes) {
  // Frames may be read while they are filled; for ThreadSanitizer only atomic accesses may race.
  warp::copy<warp::source::kStream>(lanes::all(), reinterpret_cast<uint64_t>(target),
                                    reinterpret_cast<uint64_t>(source), nbytes);
}

// Makes a copy; `nbytes` is its size, which a compiler may know.
void copy_all(const GuardedCopy& copy, size_t nbytes) {
  auto* target = static_cast<char*>(copy.target);
  const auto* source = static_cast<const char*>(copy.source);
  for (size_t i = 0; i < copy.count; ++i) {
    copy_once(target + i * nbytes, source + i * copy.stride, nbytes);
  }
}

}  // namespace

// Whether SIGBUS reaches the handler in this thread: the kernel ends a process whose thread faults
// while it blocks SIGBUS. To ask the kernel takes about as long as a copy.
bool signal_reaches_thread() {
  using Mask = GuardedVisit::Mask;
  if (GuardedVisit::mask == Mask::kOutside) return !mask_blocks_signal();
  if (GuardedVisit::mask == Mask::kUnknown) {
    GuardedVisit::mask = mask_blocks_signal() ? Mask::kBlocked : Mask::kOpen;
  }
  return GuardedVisit::mask == Mask::kOpen;
}

bool install_fault_guard() {
  static const bool installed = install();
  return installed;
}

bool fault_guard_holds() {
  struct sigaction now;
  return sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
         now.sa_sigaction == &on_bus_error;
}

void guarded_copy(GuardedCopy* copies, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) copies[i].result = CopyResult::kFailed;
  if (!signal_reaches_thread()) return;
  Guard guard;
  volatile uint32_t next = 0;
  // A fault resumes here, behind the copy that it has ended. Without saving the signal mask, which
  // is a system call: the handler unblocks the signal itself.
  sigsetjmp(guard.resume, 0);
  while (next < count) {
    GuardedCopy& copy = copies[next];
    next = next + 1;
    guard.begin = reinterpret_cast<uintptr_t>(copy.source);
    guard.end = guard.begin + (copy.count - 1) * copy.stride + copy.nbytes;
    active = &guard;
    // Orders these stores against the handler, which runs in this thread.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (copy.nbytes == 4) {
      copy_all(copy, 4);
    } else if (copy.nbytes == 8) {
      copy_all(copy, 8);
    } else {
      copy_all(copy, copy.nbytes);
    }
    // Acquire: the second load of the last byte comes after the loads of the copy.
    std::atomic_thread_fence(std::memory_order_acquire);
    const char last = *reinterpret_cast<const volatile char*>(guard.end - 1);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    active = nullptr;
    copy.result = last == 0 ? CopyResult::kEndsWithZero : CopyResult::kCopied;
  }
}

}  // namespace fw::native
