// One io_uring through raw system calls: no liburing, no development package needed at build time.
//
// Not thread-safe: the owner serialises calls. Different threads may take turns. Entries that were
// prepared reach the kernel with `submit`; completions are read from shared memory without a call.
#pragma once

#include <linux/io_uring.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fw::native {

class IoUring {
 public:
  IoUring() = default;
  IoUring(const IoUring&) = delete;
  IoUring& operator=(const IoUring&) = delete;
  ~IoUring();

  // 0, or the errno with which the kernel refused.
  int open(uint32_t entries);

  // 0 or an errno; both only make transfers cheaper.
  int register_files(const std::vector<int>& files);
  int register_buffers(const std::vector<std::pair<uint64_t, uint64_t>>& address_nbytes);

  // A cleared entry to fill in, or null when `submit` must come first.
  io_uring_sqe* prepare();

  // Hands prepared entries to the kernel; returns 0 or errno. EAGAIN, EBUSY: they stay prepared.
  int submit();
  uint32_t unsubmitted() const { return prepared_; }

  // Takes prepared entries back, for a kernel that refuses them; calls visit(user_data) for each.
  template <typename Visit>
  void withdraw(Visit visit) {
    for (; prepared_ != 0; --prepared_) {
      const uint32_t tail = *sq_tail_ - 1;
      visit(sqes_[tail & sq_mask_].user_data);
      // Release is not needed: see `prepare`.
      __atomic_store_n(sq_tail_, tail, __ATOMIC_RELAXED);
    }
  }

  // Sends one command that does nothing through a new ring; 0, or the errno of what failed.
  int try_out();

  // Calls visit(user_data, result) for at most `limit` completions; returns their number.
  template <typename Visit>
  uint32_t reap(uint32_t limit, Visit visit) {
    uint32_t head = *cq_head_;
    // Acquire: the entries were written by the kernel before it moved the tail.
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    uint32_t count = 0;
    for (; head != tail && count < limit; ++head, ++count) {
      const io_uring_cqe completion = cqes_[head & cq_mask_];
      visit(completion.user_data, completion.res);
    }
    // Release: the kernel may reuse the entries once it sees the new head.
    if (count != 0) __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return count;
  }

  // Lets the kernel post completions that wait for a system call of ours.
  void poke();

 private:
  void* map(uint64_t offset, size_t nbytes);

  int fd_ = -1;
  uint32_t prepared_ = 0;
  uint32_t sq_entries_ = 0;
  uint32_t sq_mask_ = 0;
  uint32_t cq_mask_ = 0;
  uint32_t* sq_head_ = nullptr;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* sq_array_ = nullptr;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  void* sq_ring_ = nullptr;
  void* cq_ring_ = nullptr;
  size_t sq_ring_nbytes_ = 0;
  size_t cq_ring_nbytes_ = 0;
};

// What the failure of one of io_uring's system calls means, for people.
std::string describe_io_uring_refusal(const char* call, int error);

// Whether this process may use io_uring, and if not what the kernel said.
struct IoUringProbe {
  bool available = false;
  std::string reason;
};
IoUringProbe probe_io_uring();

}  // namespace fw::native
