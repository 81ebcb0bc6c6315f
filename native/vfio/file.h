// An open file of the kernel's, closed with the object; and errors of system calls.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "vfio/drive_error.h"

namespace fw::native::vfio {

class OpenFile {
 public:
  explicit OpenFile(int fd = -1) : fd_(fd) {}
  OpenFile(OpenFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OpenFile() { close(); }

  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

[[noreturn]] inline void throw_system(const std::string& what, int error) {
  throw DriveError(DriveError::Kind::kSystem, what + ": " + std::strerror(error), error);
}

// Throws what `hint` says beside the error.
inline OpenFile open_or_throw(const std::string& path, const std::string& hint) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    throw DriveError(DriveError::Kind::kSystem,
                     path + " cannot be opened (" + std::strerror(error) + "): " + hint, error);
  }
  return OpenFile(fd);
}

}  // namespace fw::native::vfio
