// Blocking transfers of files; see file_io.h.
//
// Transfers are raw system calls. ThreadSanitizer intercepts the C library's wrappers, and would
// report the kernel's writes to cache frames as races, although atomics order them.
#include "storage/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "base/alignment.h"
#include "storage/open_file.h"
#include "storage/storage.h"

namespace fw::native {
namespace {

constexpr uint32_t kDirectPageBytes = 4096;

// The most that one direct write moves: the kernel divides it, and a disk has all parts at once.
constexpr size_t kDirectBytesMax = 4 << 20;

// How long a write waits for blocks, and how often it looks. Who holds them waits for a disk only.
constexpr int64_t kHoldLimitNs = 60'000'000'000;
constexpr auto kHoldPause = std::chrono::microseconds(20);

// statx(2) with STATX_DIOALIGN (Linux 6.1); older C libraries do not declare the two fields.
constexpr unsigned kStatxDioAlign = 0x2000;
struct RawStatx {
  uint32_t mask;
  std::byte before[0x98 - 4];
  uint32_t dio_memory_align;
  uint32_t dio_offset_align;
  std::byte after[0x100 - 0xA0];
};
static_assert(sizeof(RawStatx) == 256);
static_assert(offsetof(RawStatx, dio_memory_align) == 0x98);

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// One read, repeated only when interrupted. Returns -errno on failure.
ssize_t read_once(int fd, void* data, size_t n, uint64_t offset) {
  while (true) {
    const long result = syscall(SYS_pread64, fd, data, n, offset);
    if (result >= 0) return result;
    if (errno != EINTR) return -errno;
  }
}

bool direct_read_works(int fd, uint32_t alignment) {
  // One alignment past the start of a page, so that it fails if the file needs a coarser one.
  std::byte* scratch = thread_scratch();
  if (scratch == nullptr) return false;
  return read_once(fd, scratch + alignment, alignment, alignment) >= 0;
}

}  // namespace

std::byte* thread_scratch() {
  static thread_local std::unique_ptr<std::byte, FreeDeleter> memory(
      static_cast<std::byte*>(std::aligned_alloc(kDirectPageBytes, kScratchBytes)));
  return memory.get();
}

DirectAlignment alignment_of(int direct_fd) {
  RawStatx information = {};
  const long result =
      syscall(SYS_statx, direct_fd, "", AT_EMPTY_PATH, kStatxDioAlign, &information);
  if (result == 0 && (information.mask & kStatxDioAlign) != 0) {
    if (information.dio_offset_align == 0) {
      return {0, 0, 0, "the file system reports that this file has no direct I/O"};
    }
    return {information.dio_memory_align, information.dio_offset_align,
            information.dio_offset_align, ""};
  }
  // Some file systems take writes through the page cache if they fill no pages.
  for (uint32_t alignment : {512u, kDirectPageBytes}) {
    if (direct_read_works(direct_fd, alignment)) {
      return {alignment, alignment, kDirectPageBytes, ""};
    }
  }
  return {0, 0, 0, "direct reads fail with 512 and with 4096 byte alignment"};
}

DirectAlignment probe_direct_alignment(const std::string& path) {
  int fd = -1;
  try {
    fd = open_file(path, false, O_DIRECT);
  } catch (const OpenError& error) {
    return {0, 0, 0, std::string("open with O_DIRECT: ") + error.what()};
  }
  DirectAlignment alignment = alignment_of(fd);
  close(fd);
  return alignment;
}

int read_fully(int fd, void* data, size_t n, uint64_t offset, size_t* moved) {
  size_t done = 0;
  int error = 0;
  while (done != n && error == 0) {
    const ssize_t result =
        read_once(fd, static_cast<std::byte*>(data) + done, n - done, offset + done);
    if (result > 0) done += size_t(result);
    error = result > 0 ? 0 : result == 0 ? kTruncated : int(-result);
  }
  if (moved != nullptr) *moved = done;
  return error;
}

int write_fully(int fd, const void* data, size_t n, uint64_t offset, size_t* moved) {
  size_t done = 0;
  int error = 0;
  while (done != n && error == 0) {
    const long result = syscall(SYS_pwrite64, fd, static_cast<const std::byte*>(data) + done,
                                n - done, offset + done);
    if (result > 0) done += size_t(result);
    if (result < 0 && errno != EINTR) error = errno;
    if (result == 0) error = ENOSPC;
  }
  if (moved != nullptr) *moved = done;
  return error;
}

// Reads.

int FileIo::read(bool direct, uint64_t offset, void* data, size_t n) const {
  auto* const target = static_cast<std::byte*>(data);
  return direct ? read_direct(offset, target, n) : read_fully(fd_, target, n, offset);
}

int FileIo::read_direct(uint64_t offset, std::byte* data, size_t n) const {
  const uint32_t alignment = direct_.alignment;
  if (is_aligned(reinterpret_cast<uint64_t>(data) | offset, alignment)) {
    const size_t whole = round_down(n, alignment);
    if (int error = read_fully(direct_.fd, data, whole, offset)) return error;
    data += whole;
    offset += whole;
    n -= whole;
  }
  std::byte* const scratch = n == 0 ? nullptr : thread_scratch();
  if (n != 0 && scratch == nullptr) return ENOMEM;
  while (n != 0) {
    const uint64_t start = round_down(offset, alignment);
    const size_t lead = offset - start;
    const size_t take = std::min(n, kScratchBytes - lead - alignment);
    const ssize_t result = read_once(direct_.fd, scratch, round_up(lead + take, alignment), start);
    if (result < 0) return int(-result);
    if (size_t(result) <= lead) return kTruncated;
    const size_t got = std::min(take, size_t(result) - lead);
    std::memcpy(data, scratch + lead, got);
    data += got;
    offset += got;
    n -= got;
  }
  return 0;
}

// Writes.

// Blocks that a blocking call writes. It waits for them, so a thread whose own transfers hold some
// ends these first.
class FileIo::Holding {
 public:
  explicit Holding(const BlockClaim& claim) : claim_(claim) {
    const int64_t end = monotonic_ns() + kHoldLimitNs;
    while (!(held_ = claim_.take()) && monotonic_ns() < end)
      std::this_thread::sleep_for(kHoldPause);
    if (!held_) claim_.withdraw();
  }
  ~Holding() {
    if (held_) claim_.release();
  }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

  int error() const { return held_ ? 0 : ETIMEDOUT; }

 private:
  BlockClaim claim_;
  bool held_ = false;
};

BlockClaim FileIo::claim_of(uint64_t from, uint64_t n) const {
  // Relaxed: a look that is late is corrected by the transfer, which finds the file too short.
  const uint64_t file_end = file_end_.load(std::memory_order_relaxed);
  const uint32_t unit = direct_.write_alignment;
  const uint64_t begin = round_down(from, unit);
  const uint64_t end = begin + unit;
  BlockClaim claim = {direct_.blocks.get()};
  claim.offset = from;
  claim.nbytes = std::min(n, end - from);
  if (begin == from && n >= unit) {
    claim.nbytes = round_down(n, unit);
  } else {
    claim.kind = end > file_end ? BlockClaim::Kind::kTail : BlockClaim::Kind::kPart;
  }
  claim.beside_tail = !is_aligned(file_end, unit) &&
                      from + claim.nbytes > round_down(file_end, BlockLocks::kFolioBytesMax);
  return claim;
}

int FileIo::write(bool direct, uint64_t offset, const void* data, size_t n) const {
  if (!direct) return write_fully(fd_, data, n, offset);
  const auto* source = static_cast<const std::byte*>(data);
  while (n != 0) {
    const bool aligned = is_aligned(reinterpret_cast<uint64_t>(source), direct_.alignment);
    const BlockClaim claim =
        claim_of(offset, std::min(n, aligned ? kDirectBytesMax : kScratchBytes));
    if (int error = write_claimed(claim, source)) return error;
    source += claim.nbytes;
    offset += claim.nbytes;
    n -= claim.nbytes;
  }
  return 0;
}

int FileIo::write_claimed(const BlockClaim& claim, const std::byte* data) const {
  const Holding holding(claim);
  if (int error = holding.error()) return error;
  if (claim.kind == BlockClaim::Kind::kPart) return write_part(claim.offset, data, claim.nbytes);
  if (claim.kind == BlockClaim::Kind::kTail) {
    if (int error = write_fully(fd_, data, claim.nbytes, claim.offset)) return error;
    return fdatasync(fd_) == 0 ? 0 : errno;
  }
  if (!is_aligned(reinterpret_cast<uint64_t>(data), direct_.alignment)) {
    std::byte* const scratch = thread_scratch();
    if (scratch == nullptr) return ENOMEM;
    data = static_cast<const std::byte*>(std::memcpy(scratch, data, claim.nbytes));
  }
  return write_fully(direct_.fd, data, claim.nbytes, claim.offset);
}

int FileIo::write_part(uint64_t offset, const std::byte* data, size_t n) const {
  std::byte* const scratch = thread_scratch();
  if (scratch == nullptr) return ENOMEM;
  const uint32_t unit = direct_.write_alignment;
  const uint64_t begin = round_down(offset, unit);
  if (int error = read_fully(direct_.fd, scratch, unit, begin)) return error;
  std::memcpy(scratch + (offset - begin), data, n);
  return write_fully(direct_.fd, scratch, unit, begin);
}

int FileIo::deallocate(int mode, uint64_t offset, uint64_t n) const {
  std::optional<Holding> holding;
  if (direct_.blocks != nullptr) holding.emplace(claim_of(offset, n));
  if (holding && holding->error() != 0) return holding->error();
  mode |= FALLOC_FL_KEEP_SIZE;
  return fallocate(fd_, mode, off_t(offset), off_t(n)) == 0 ? 0 : errno;
}

}  // namespace fw::native
