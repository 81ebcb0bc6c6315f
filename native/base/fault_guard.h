// Copies from mapped files, where a page that is gone is a failed copy and not the end of the
// process.
//
// Touching a mapping beyond the end of its file, or a page that cannot be read, raises SIGBUS. One
// handler for the process ends the copy of the thread that met it; whatever else raises SIGBUS
// goes to the handler that was there before. Handlers that the program installs later displace
// ours: ask `fault_guard_holds` now and then. A thread that blocks the signal copies nothing here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

// Puts the handler in place, once. It stays: another library may have saved it as its predecessor.
// False when the system refuses.
bool install_fault_guard();

// Whether SIGBUS reaches our handler now. One system call.
bool fault_guard_holds();

// A stretch of a thread's time in which only our code runs in it, so that nobody changes the
// thread's signal mask: the life of a thread of ours, a launch, a turn at serving. Copies look at
// the mask once in the outermost visit; outside of visits, each time.
class GuardedVisit {
 public:
  GuardedVisit() : outermost_(mask == Mask::kOutside) {
    if (outermost_) mask = Mask::kUnknown;
  }
  ~GuardedVisit() {
    if (outermost_) mask = Mask::kOutside;
  }
  GuardedVisit(const GuardedVisit&) = delete;
  GuardedVisit& operator=(const GuardedVisit&) = delete;

 private:
  friend bool signal_reaches_thread();
  enum class Mask : uint8_t { kOutside, kUnknown, kOpen, kBlocked };
  // Initial-exec: a call of the C library for each access would cost a tenth of a copy.
  static inline thread_local Mask mask __attribute__((tls_model("initial-exec"))) = Mask::kOutside;
  const bool outermost_;
};

enum class CopyResult {
  kCopied,
  kEndsWithZero,  // copied; the last byte is zero, as after the end of a file in its last page
  kFailed,        // part of the source could not be read; the target holds anything
};

// Copies `n` > 0 bytes from a mapping; needs the handler in place. The last byte is looked at again
// after all others were read: when it is not zero, the file was not cut short before.
CopyResult guarded_copy(void* target, const void* source, size_t n);

}  // namespace fw::native
