// fw::file: an open file as a kernel holds it; its end, and what it lets calls do.
#pragma once

#include "flashwarp/array/view.cuh"

namespace fw {

// Errors are the negative errno values of Linux.
enum file_error : int64_t {
  kFileIo = -5,          // EIO: a transfer failed. The host raises why, after the launch.
  kFileBadMode = -9,     // EBADF: the file is not open for this
  kFileInvalid = -22,    // EINVAL: offset + nbytes exceeds 2^63 - 1
  kFileNoSpace = -28,    // ENOSPC: the capacity ends before the bytes do; none was written
  kFileTimedOut = -110,  // ETIMEDOUT: a wait ran out of time. The host raises it, too.
};

enum file_mode : uint32_t { kFileRead = 1, kFileWrite = 2 };

// What kernels change of an open file, in device memory.
struct file_state {
  uint64_t size;  // bytes; grows only
};

// A view of 96 bytes, passed by value.
struct file {
  array<uint8_t> bytes;  // as long as the capacity
  file_state* state;
  uint32_t mode;
  uint32_t lines_ahead;  // lines to prefetch behind reads; 0: none
  uint64_t fixed_size;   // of a file that is only read: no read waits for a look at the state

  // Bytes up to the end of the file.
  FW_DEVICE uint64_t size() const {
    return (mode & kFileWrite) == 0 ? fixed_size : atomic::load_relaxed(&state->size);
  }
  FW_DEVICE uint64_t capacity() const { return bytes.length; }
};
static_assert(sizeof(file) == 96);

namespace detail {

inline constexpr uint64_t kFileBytesMax = ~uint64_t(0) >> 1;

FW_DEVICE int64_t file_result(uint32_t status, uint64_t nbytes) {
  if (status == nvme::kSuccess) return int64_t(nbytes);
  return status == nvme::kTimedOut ? kFileTimedOut : kFileIo;
}

// How many bytes a read moves, or why it moves none.
FW_DEVICE int64_t readable(const file& f, uint64_t offset, uint64_t nbytes) {
  if ((f.mode & kFileRead) == 0) return kFileBadMode;
  if (nbytes > kFileBytesMax || offset > kFileBytesMax - nbytes) return kFileInvalid;
  const uint64_t size = f.size();
  if (offset >= size) return 0;
  return int64_t(nbytes < size - offset ? nbytes : size - offset);
}

// The same for a write, which moves all or nothing.
FW_DEVICE int64_t writable(const file& f, uint64_t offset, uint64_t nbytes) {
  if ((f.mode & kFileWrite) == 0) return kFileBadMode;
  if (nbytes > kFileBytesMax || offset > kFileBytesMax - nbytes) return kFileInvalid;
  if (offset > f.capacity() || nbytes > f.capacity() - offset) return kFileNoSpace;
  return int64_t(nbytes);
}

// Lets the file end at `end` or later. `size` is what it was at some time. One lane for each call.
FW_DEVICE void extend_to(const file& f, uint64_t size, uint64_t end) {
  while (size < end) {
    // Release: who sees the new size sees the bytes before it.
    if (atomic::cas_acq_rel(&f.state->size, size, end)) return;
    size = atomic::load_relaxed(&f.state->size);
  }
}

// Takes the next `nbytes` of the file. Returns their offset, or the error.
FW_DEVICE int64_t take_end(const file& f, uint64_t nbytes) {
  while (true) {
    const uint64_t size = atomic::load_relaxed(&f.state->size);
    const int64_t fits = writable(f, size, nbytes);
    if (fits < 0) return fits;
    if (atomic::cas_acq_rel(&f.state->size, size, size + nbytes)) return int64_t(size);
  }
}

}  // namespace detail

}  // namespace fw
