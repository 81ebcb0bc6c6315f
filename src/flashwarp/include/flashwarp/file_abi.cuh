// Files for kernels of other compilers: functions with C linkage, linked as LTO-IR.
//
// The other compiler passes the address of a file's struct. The functions are those of `file.cuh`,
// but that an append returns where its bytes begin.
#pragma once

#include "flashwarp/file.cuh"

namespace fw::c_abi {

FW_DEVICE const file& file_at(const void* address) { return *static_cast<const file*>(address); }

// What an append has returned, or the place that it has taken.
FW_DEVICE int64_t place_of(int64_t got, uint64_t at) { return got < 0 ? got : int64_t(at); }

}  // namespace fw::c_abi

#define FW_FILE_FUNCTIONS(PREFIX, SCOPE)                                                          \
  FW_DEVICE_C int64_t fw_##PREFIX##read(const void* f, void* to, uint64_t offset, uint64_t n) {   \
    return SCOPE::read(fw::c_abi::file_at(f), to, offset, n);                                     \
  }                                                                                               \
  FW_DEVICE_C int64_t fw_##PREFIX##read_around(const void* f, void* to, uint64_t offset,          \
                                               uint64_t n) {                                      \
    return SCOPE::read_around(fw::c_abi::file_at(f), to, offset, n);                              \
  }                                                                                               \
  FW_DEVICE_C int64_t fw_##PREFIX##write(const void* f, const void* from, uint64_t offset,        \
                                         uint64_t n) {                                            \
    return SCOPE::write(fw::c_abi::file_at(f), from, offset, n);                                  \
  }                                                                                               \
  FW_DEVICE_C int64_t fw_##PREFIX##write_around(const void* f, const void* from, uint64_t offset, \
                                                uint64_t n) {                                     \
    return SCOPE::write_around(fw::c_abi::file_at(f), from, offset, n);                           \
  }                                                                                               \
  FW_DEVICE_C int64_t fw_##PREFIX##append(const void* f, const void* from, uint64_t n) {          \
    uint64_t at = 0;                                                                              \
    const int64_t got = SCOPE::append(fw::c_abi::file_at(f), from, n, &at);                       \
    return fw::c_abi::place_of(got, at);                                                          \
  }

FW_FILE_FUNCTIONS(file_, fw)
FW_FILE_FUNCTIONS(file_warp_, fw::warp)
FW_FILE_FUNCTIONS(file_block_, fw::block)
#undef FW_FILE_FUNCTIONS

FW_DEVICE_C int64_t fw_file_warp_flush(const void* f, uint64_t offset, uint64_t n) {
  return fw::warp::flush(fw::c_abi::file_at(f), offset, n);
}
FW_DEVICE_C int64_t fw_file_block_flush(const void* f, uint64_t offset, uint64_t n) {
  return fw::block::flush(fw::c_abi::file_at(f), offset, n);
}
FW_DEVICE_C uint64_t fw_file_size(const void* f) { return fw::c_abi::file_at(f).size(); }
FW_DEVICE_C uint64_t fw_file_capacity(const void* f) { return fw::c_abi::file_at(f).capacity(); }
