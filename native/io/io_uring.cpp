// io_uring set-up and submission; see io_uring.h.
#include "io/io_uring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace fw::native {

std::string describe_io_uring_refusal(const char* call, int error) {
  const char* name = strerrorname_np(error);
  std::string text = std::string(call) + " refused: " + (name ? name : "unknown error");
  if (error == EPERM) text += " (container seccomp profile? kernel.io_uring_disabled?)";
  if (error == ENOSYS) text += " (kernel without io_uring, or a sandbox that hides it)";
  if (error == ENOMEM) text += " (memory lock limit, see ulimit -l)";
  return text;
}

IoUring::~IoUring() {
  if (sqes_ != nullptr) munmap(sqes_, sqes_nbytes());
  if (cq_ring_ != nullptr) munmap(cq_ring_, cq_ring_nbytes_);
  if (sq_ring_ != nullptr) munmap(sq_ring_, sq_ring_nbytes_);
  if (fd_ >= 0) close(fd_);
}

void* IoUring::map(uint64_t offset, size_t nbytes) {
  void* memory =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, off_t(offset));
  return memory == MAP_FAILED ? nullptr : memory;
}

int IoUring::open(uint32_t entries, bool large) {
  io_uring_params params = {};
  if (large) params.flags = IORING_SETUP_SQE128 | IORING_SETUP_CQE32;
  large_ = large ? 1 : 0;
  fd_ = int(syscall(SYS_io_uring_setup, entries, &params));
  if (fd_ < 0) return errno;
  sq_entries_ = params.sq_entries;
  sq_ring_nbytes_ = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  cq_ring_nbytes_ = params.cq_off.cqes + (params.cq_entries * sizeof(io_uring_cqe) << large_);
  sq_ring_ = map(IORING_OFF_SQ_RING, sq_ring_nbytes_);
  cq_ring_ = map(IORING_OFF_CQ_RING, cq_ring_nbytes_);
  sqes_ = static_cast<io_uring_sqe*>(map(IORING_OFF_SQES, sqes_nbytes()));
  if (sq_ring_ == nullptr || cq_ring_ == nullptr || sqes_ == nullptr) return ENOMEM;

  const auto at = [](void* ring, uint32_t offset) {
    return reinterpret_cast<uint32_t*>(static_cast<char*>(ring) + offset);
  };
  sq_head_ = at(sq_ring_, params.sq_off.head);
  sq_tail_ = at(sq_ring_, params.sq_off.tail);
  sq_mask_ = *at(sq_ring_, params.sq_off.ring_mask);
  sq_array_ = at(sq_ring_, params.sq_off.array);
  cq_head_ = at(cq_ring_, params.cq_off.head);
  cq_tail_ = at(cq_ring_, params.cq_off.tail);
  cq_mask_ = *at(cq_ring_, params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(at(cq_ring_, params.cq_off.cqes));
  return 0;
}

int IoUring::register_files(const std::vector<int>& files) {
  const long result =
      syscall(SYS_io_uring_register, fd_, IORING_REGISTER_FILES, files.data(), files.size());
  return result < 0 ? errno : 0;
}

int IoUring::register_buffers(const std::vector<std::pair<uint64_t, uint64_t>>& address_nbytes) {
  std::vector<iovec> buffers;
  for (const auto& [address, nbytes] : address_nbytes) {
    buffers.push_back({reinterpret_cast<void*>(address), nbytes});
  }
  const long result =
      syscall(SYS_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(), buffers.size());
  return result < 0 ? errno : 0;
}

io_uring_sqe* IoUring::prepare() {
  const uint32_t tail = *sq_tail_;
  // Acquire: the kernel read the entry of the last lap before it moved the head.
  if (tail - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) == sq_entries_) return nullptr;
  const uint32_t index = tail & sq_mask_;
  sq_array_[index] = index;
  io_uring_sqe* entry = &sqes_[index << large_];
  std::memset(entry, 0, sizeof *entry << large_);
  // Relaxed: the kernel reads the tail in `submit`, which is a system call of this thread.
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELAXED);
  ++prepared_;
  return entry;
}

int IoUring::submit() {
  while (prepared_ != 0) {
    const long result = syscall(SYS_io_uring_enter, fd_, prepared_, 0, 0, nullptr, 0);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return errno;
    if (result == 0) return EAGAIN;
    prepared_ -= std::min(prepared_, uint32_t(result));
  }
  return 0;
}

int IoUring::try_out() {
  io_uring_sqe* entry = prepare();
  if (entry == nullptr) return EIO;
  entry->opcode = IORING_OP_NOP;
  if (int error = submit()) return error;
  // The kernel completes this command before the call that submits it returns.
  return reap(1, [](uint64_t, int32_t) {}) == 1 ? 0 : EIO;
}

void IoUring::poke() { syscall(SYS_io_uring_enter, fd_, 0, 0, IORING_ENTER_GETEVENTS, nullptr, 0); }

std::string probe_io_uring() {
  IoUring ring;
  if (int error = ring.open(8)) return describe_io_uring_refusal("io_uring_setup", error);
  // A sandbox may allow one call and refuse the other, so try both.
  const int error = ring.try_out();
  return error == 0 ? "" : describe_io_uring_refusal("io_uring_enter", error);
}

}  // namespace fw::native
