// Locks a file: one writer in all processes and, within this process, no reader beside a writer,
// because caches in one process do not see each other's stores.
//
// The writer holds flock(2) on the data file's descriptor. So there is no lock file, and the kernel
// releases the lock of a process that dies. Other processes may read meanwhile.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/fork_guard.h"

namespace fw::native {

class BlockLocks;

// Takes flock(2) on a descriptor for one writer. Returns 0 or an errno value. Waits half a second
// at most, because the kernel takes a moment to close the files of a process that was killed.
int lock_for_writing(int fd);

class FileLock {
 public:
  // Throws OpenError: EDEADLK if this process has the file open in a way that excludes this use,
  // EWOULDBLOCK if another process writes it. `fd` must outlive the lock.
  static std::unique_ptr<FileLock> take(int fd, const struct stat& information, bool writable,
                                        const std::string& path);
  // The blocks of a file that this process writes past the page cache, for all of its storages.
  static std::shared_ptr<BlockLocks> blocks_of(const struct stat& information);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // "held", or why the file system has no lock.
  const std::string& state() const { return state_; }

 private:
  struct Key {
    uint64_t device, inode;
    uint32_t generation;  // of forks: files that a parent has open are not open in its child
    auto operator<=>(const Key&) const = default;
  };
  static Key key_of(const struct stat& information);
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
