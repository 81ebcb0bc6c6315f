// One io_uring by raw system calls, so that the build needs no liburing.
//
// Not thread-safe: the owner serialises calls, and threads may take turns. `submit` passes prepared
// entries to the kernel. Completions are read from shared memory, without a system call.
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

  // Returns 0, or the errno value of the kernel's refusal. NVMe commands need entries of twice the
  // size (Linux 5.19).
  int open(uint32_t entries, bool large = false);

  // Return 0 or an errno value. Both are optional, and make transfers cheaper.
  int register_files(const std::vector<int>& files);
  int register_buffers(const std::vector<std::pair<uint64_t, uint64_t>>& address_nbytes);

  // Returns a cleared entry to fill in, or null if `submit` must come first.
  io_uring_sqe* prepare();

  // Passes prepared entries to the kernel. Returns 0 or an errno value. After EAGAIN or EBUSY the
  // entries stay prepared.
  int submit();
  uint32_t unsubmitted() const { return prepared_; }

  // Removes prepared entries, which the kernel refuses. Calls visit(user_data) for each.
  template <typename Visit>
  void withdraw(Visit visit) {
    for (; prepared_ != 0; --prepared_) {
      const uint32_t tail = *sq_tail_ - 1;
      visit(sqes_[(tail & sq_mask_) << large_].user_data);
      // Relaxed: see `prepare`.
      __atomic_store_n(sq_tail_, tail, __ATOMIC_RELAXED);
    }
  }

  // Runs a command without effect through a new ring. Returns 0 or the errno value of a failure.
  int try_out();

  // Calls visit(user_data, result) for at most `limit` completions. Returns their number.
  template <typename Visit>
  uint32_t reap(uint32_t limit, Visit visit) {
    uint32_t head = *cq_head_;
    // Acquire: the kernel wrote the entries before it moved the tail.
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    uint32_t count = 0;
    for (; head != tail && count < limit; ++head, ++count) {
      const io_uring_cqe& completion = cqes_[(head & cq_mask_) << large_];
      visit(completion.user_data, completion.res);
    }
    // Release: the kernel reuses the entries once it sees the new head.
    if (count != 0) __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return count;
  }

  // Makes the system call that the kernel may need to post completions.
  void poke();

 private:
  void* map(uint64_t offset, size_t nbytes);
  size_t sqes_nbytes() const { return sq_entries_ * sizeof(io_uring_sqe) << large_; }

  int fd_ = -1;
  uint32_t prepared_ = 0;
  uint32_t large_ = 0;  // log2 of the size of entries, in those of their types
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

// The text of a failed system call of io_uring, for people.
std::string describe_io_uring_refusal(const char* call, int error);

// Why this process may not use io_uring; empty if it may.
std::string probe_io_uring();

}  // namespace fw::native
