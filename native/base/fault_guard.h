// Copies from mapped files: if a page is gone, the copy fails, and the process goes on.
//
// An access to a mapping beyond the end of its file, or to a page that cannot be read, raises
// SIGBUS. One handler for the process ends the copy of that thread. It passes any other SIGBUS to
// the handler that was installed before. A handler that the program installs later replaces this
// one, so callers check `fault_guard_holds` now and then. If a thread blocks the signal, its copies
// fail.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

// Installs the handler, once. It is never removed, because another library may have saved it as its
// predecessor. Returns false if the system refuses.
bool install_fault_guard();

// Whether SIGBUS reaches our handler now. One system call.
bool fault_guard_holds();

// A period in which a thread runs only the library's code, so that its signal mask does not change:
// the life of one of the library's threads, a launch, or a call of `serve`. Copies look at the mask
// once in the outermost visit; outside of visits, each time.
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
  // Initial-exec, because a call of the C library for each access would cost a tenth of a copy.
  static inline thread_local Mask mask __attribute__((tls_model("initial-exec"))) = Mask::kOutside;
  const bool outermost_;
};

enum class CopyResult {
  kCopied,
  kEndsWithZero,  // copied; the last byte is zero, as behind the end of a file in its last page
  kFailed,        // a part of the source could not be read; the target is undefined
};

struct GuardedCopy {
  void* target;
  const void* source;
  size_t nbytes;  // more than 0
  CopyResult result;
  // So many times, from sources that lie `stride` bytes apart, to the target back to back.
  size_t count = 1;
  size_t stride = 0;
};

// Makes copies from mappings, and sets their results. The handler must be installed. Reads the last
// byte of each again at its end: if it is not zero, the file was not truncated before.
void guarded_copy(GuardedCopy* copies, uint32_t count);

}  // namespace fw::native
