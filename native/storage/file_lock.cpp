// flock(2) and the table of this process; see file_lock.h.
#include "storage/file_lock.h"

#include <pthread.h>
#include <sys/file.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "storage/storage.h"

namespace fw::native {
namespace {

constexpr auto kReleaseWait = std::chrono::milliseconds(500);
constexpr auto kReleasePoll = std::chrono::milliseconds(5);

}  // namespace

struct FileLock::Table {
  std::mutex mutex;
  std::map<Key, Users> users;
  std::map<Key, std::weak_ptr<BlockLocks>> blocks;
};

// Never freed, because storages may be closed while the process exits.
FileLock::Table& FileLock::table() {
  static Table* const held = [] {
    auto* made = new Table;
    // A child must not inherit a mutex that a thread of its parent holds.
    pthread_atfork([] { table().mutex.lock(); }, [] { table().mutex.unlock(); },
                   [] { table().mutex.unlock(); });
    return made;
  }();
  return *held;
}

int lock_for_writing(int fd) {
  // The io_uring of a dead process keeps its files open for some milliseconds.
  const auto end = std::chrono::steady_clock::now() + kReleaseWait;
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= end) return errno;
    std::this_thread::sleep_for(kReleasePoll);
  }
  return 0;
}

FileLock::Key FileLock::key_of(const struct stat& information) {
  // Several nodes may name one block device.
  const bool is_block_device = S_ISBLK(information.st_mode);
  return {is_block_device ? uint64_t(information.st_rdev) : uint64_t(information.st_dev),
          is_block_device ? 0 : uint64_t(information.st_ino), fork_generation()};
}

std::shared_ptr<BlockLocks> FileLock::blocks_of(const struct stat& information) {
  const std::lock_guard guard(table().mutex);
  std::erase_if(table().blocks, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<BlockLocks>& known = table().blocks[key_of(information)];
  std::shared_ptr<BlockLocks> blocks = known.lock();
  if (blocks == nullptr) known = blocks = std::make_shared<BlockLocks>();
  return blocks;
}

std::unique_ptr<FileLock> FileLock::take(int fd, const struct stat& information, bool writable,
                                         const std::string& path) {
  const Key key = key_of(information);
  std::unique_ptr<FileLock> lock(new FileLock(fd, key, writable));
  {
    const std::lock_guard guard(table().mutex);
    Users& users = table().users[key];
    if (users.writers != 0) throw OpenError(EDEADLK, "open for writing in this process", path);
    if (writable && users.readers != 0) {
      throw OpenError(EDEADLK, "open for reading in this process", path);
    }
    ++(writable ? users.writers : users.readers);
    lock->entered_ = true;
  }
  if (!writable) return lock;
  const int error = lock_for_writing(fd);
  if (error == EWOULDBLOCK) throw OpenError(EWOULDBLOCK, "another process writes it", path);
  lock->locked_ = error == 0;
  lock->state_ =
      error == 0 ? "held" : std::string("none, the file system refuses: ") + std::strerror(error);
  return lock;
}

FileLock::~FileLock() {
  // A child shares the lock of its parent, which may go on writing.
  if (fork_guard_.in_child()) return;
  // Unlock explicitly: close(2) does not if a child has the descriptor too.
  if (locked_) flock(fd_, LOCK_UN);
  if (!entered_) return;
  const std::lock_guard guard(table().mutex);
  const auto found = table().users.find(key_);
  --(writable_ ? found->second.writers : found->second.readers);
  if (found->second.readers == 0 && found->second.writers == 0) table().users.erase(found);
}

}  // namespace fw::native
