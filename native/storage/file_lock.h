// Who may use a file: one writer, over all processes; and within this process, whose caches do not
// know of each other, no reader beside a writer.
//
// The writer holds flock(2) on the descriptor of the data: no other file is made, and the kernel
// takes the lock back from a process that died. Readers of other processes go on.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/fork_guard.h"

namespace fw::native {

// Takes flock(2) on a descriptor for one writer; returns 0 or an errno value. Waits half a
// second at most, for the kernel to close the files of a process that was killed just now.
int lock_for_writing(int fd);

class FileLock {
 public:
  // Throws OpenError: EDEADLK when this process has the file open in a way that excludes this one,
  // EWOULDBLOCK when another process writes it. `fd` must outlive the lock.
  static std::unique_ptr<FileLock> take(int fd, const struct stat& information, bool writable,
                                        const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // "held"; or why the file system has no lock.
  const std::string& state() const { return state_; }

 private:
  struct Key {
    uint64_t device, inode;
    uint32_t generation;  // of forks: what a parent has open is not open in its child
    auto operator<=>(const Key&) const = default;
  };
  struct Users {
    uint32_t readers = 0;
    uint32_t writers = 0;
  };
  struct Table;
  static Table& table();

  FileLock(int fd, const Key& key, bool writable) : fd_(fd), key_(key), writable_(writable) {}

  const int fd_;
  const Key key_;
  const bool writable_;
  bool entered_ = false;
  bool locked_ = false;
  std::string state_;
  ForkGuard fork_guard_;
};

}  // namespace fw::native
