// Opens regular files and block devices, and nothing else.
//
// A FIFO would block, a character device has no end, and a file of /proc has no size. Each is
// refused by its name before it is opened, and again by its descriptor, which cannot be replaced.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace fw::native {

// Returns a descriptor that the caller closes; `flags` are added to those of open(2). Throws
// OpenError. Its error is kLeased while the kernel takes a lease on the file back from another
// process: try again.
inline constexpr int kLeased = EINPROGRESS;  // which open(2) never gives
int open_file(const std::string& path, bool writable, int flags = 0);

// Bytes of an open file or block device.
uint64_t size_of(int fd, const struct stat& information);

}  // namespace fw::native
