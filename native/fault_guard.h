// Copies from mapped files, where a page that is gone is a failed copy and not the end of the
// process.
//
// Touching a mapping beyond the end of its file, or a page that cannot be read, raises SIGBUS. One
// handler for the process ends the copy of the thread that met it; whatever else raises SIGBUS
// goes to the handler that was there before. Handlers that the program installs later displace
// ours: ask `fault_guard_holds` now and then.
#pragma once

#include <cstddef>

namespace fw::native {

// Puts the handler in place, once. It stays: another library may have saved it as its predecessor.
// False when the system refuses.
bool install_fault_guard();

// Whether SIGBUS reaches our handler now. One system call.
bool fault_guard_holds();

enum class CopyResult {
  kCopied,
  kEndsWithZero,  // copied; the last byte is zero, as after the end of a file in its last page
  kFailed,        // part of the source could not be read; the target holds anything
};

// Copies `n` > 0 bytes from a mapping; needs the handler in place. The last byte is looked at again
// after all others were read: when it is not zero, the file was not cut short before.
CopyResult guarded_copy(void* target, const void* source, size_t n);

}  // namespace fw::native
