// Kinds of files; see open_file.h.
#include "storage/open_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "storage/storage.h"

namespace fw::native {
namespace {

// File systems whose files are generated when they are read.
constexpr std::array<long, 12> kPseudoFileSystems = {
    PROC_SUPER_MAGIC, SYSFS_MAGIC,    DEBUGFS_MAGIC,      TRACEFS_MAGIC,
    SECURITYFS_MAGIC, SELINUX_MAGIC,  CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC,
    BPF_FS_MAGIC,     EFIVARFS_MAGIC, PSTOREFS_MAGIC,     0x62656570,  // configfs
};

// Why files of this mode are refused; null if they are not.
const char* refusal_of(mode_t mode) {
  if (S_ISREG(mode) || S_ISBLK(mode)) return nullptr;
  if (S_ISDIR(mode)) return "is a directory, not a file";
  if (S_ISFIFO(mode)) return "is a FIFO, which has no places to read from: save it to a file";
  if (S_ISSOCK(mode)) return "is a socket, which has no places to read from";
  return "is a character device, neither a regular file nor a block device";
}

class Opening {
 public:
  explicit Opening(const std::string& path) : path_(path) {}
  ~Opening() {
    if (fd_ >= 0) close(fd_);
  }
  Opening(const Opening&) = delete;

  int open(int flags) {
    struct stat information;
    // By name first, because opening a device can have effects.
    if (stat(path_.c_str(), &information) != 0) refuse(errno);
    check_kind(information);
    fd_ = open_without_blocking(flags);
    if (fstat(fd_, &information) != 0) refuse(errno);
    check_kind(information);
    if (S_ISREG(information.st_mode)) check_contents(information);
    // With O_NONBLOCK set, io_uring would return EAGAIN again and again.
    const int kept = fcntl(fd_, F_GETFL);
    if (kept < 0 || fcntl(fd_, F_SETFL, kept & ~O_NONBLOCK) != 0) refuse(errno);
    return std::exchange(fd_, -1);
  }

 private:
  [[noreturn]] void refuse(int error) { refuse(error, std::strerror(error)); }
  [[noreturn]] void refuse(int error, const std::string& why) {
    throw OpenError(error, why, path_);
  }

  void check_kind(const struct stat& information) {
    if (const char* why = refusal_of(information.st_mode)) {
      refuse(S_ISDIR(information.st_mode) ? EISDIR : EINVAL, why);
    }
  }

  // O_NONBLOCK, because the file may have become a FIFO since the look. With this flag, open(2)
  // returns EWOULDBLOCK if another process has a lease on the file, which the kernel then begins to
  // take back.
  int open_without_blocking(int flags) {
    int fd;
    do {
      fd = ::open(path_.c_str(), flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    if (fd >= 0) return fd;
    if (errno == EWOULDBLOCK) refuse(kLeased, "another process holds a lease on it");
    refuse(errno);
  }

  void check_contents(const struct stat& information) {
    struct statfs system;
    if (fstatfs(fd_, &system) == 0 &&
        std::find(kPseudoFileSystems.begin(), kPseudoFileSystems.end(),
                  long(uint32_t(system.f_type))) != kPseudoFileSystems.end()) {
      refuse(EINVAL, "is made by the kernel when it is read, and has no size: copy it to a file");
    }
    char byte;
    if (information.st_size == 0 && syscall(SYS_pread64, fd_, &byte, 1, 0) > 0 &&
        is_still_empty()) {
      refuse(EINVAL, "says that it is empty and has contents: copy it to a file");
    }
  }

  // False if another process has begun to write it since.
  bool is_still_empty() {
    struct stat information;
    return fstat(fd_, &information) == 0 && information.st_size == 0;
  }

  const std::string& path_;
  int fd_ = -1;
};

}  // namespace

int open_file(const std::string& path, bool writable, int flags) {
  return Opening(path).open((writable ? O_RDWR : O_RDONLY) | flags);
}

uint64_t size_of(int fd, const struct stat& information) {
  if (!S_ISBLK(information.st_mode)) return uint64_t(information.st_size);
  uint64_t nbytes = 0;
  return ioctl(fd, BLKGETSIZE64, &nbytes) == 0 ? nbytes : 0;
}

}  // namespace fw::native
