// Batches for kernels of other compilers: functions with C linkage, linked as LTO-IR.
//
// The other compiler passes the address of a pipeline's struct. Buffers are bytes, so the element
// type does not matter. `rows_32` and `rows_64` say how wide the ids are.
#pragma once

#include "flashwarp/batch.cuh"

namespace fw::c_abi {

FW_DEVICE const pipeline<char>& pipeline_at(const void* address) {
  return *static_cast<const pipeline<char>*>(address);
}

}  // namespace fw::c_abi

// Calls of the whole launch, and of one block.
#define FW_BATCH_FUNCTIONS(BITS)                                                                   \
  FW_DEVICE_C uint64_t fw_prefetch_rows_##BITS(const void* p, const void* ids, uint64_t n,         \
                                               void* to) {                                         \
    return fw::c_abi::pipeline_at(p).prefetch(static_cast<const int##BITS##_t*>(ids), n,           \
                                              static_cast<char*>(to));                             \
  }                                                                                                \
  FW_DEVICE_C uint64_t fw_block_prefetch_rows_##BITS(const void* p, const void* ids, uint64_t n,   \
                                                     void* to) {                                   \
    return fw::block::prefetch(fw::c_abi::pipeline_at(p), static_cast<const int##BITS##_t*>(ids),  \
                               n, static_cast<char*>(to));                                         \
  }                                                                                                \
  FW_DEVICE_C uint64_t fw_write_back_rows_##BITS(const void* p, const void* ids, uint64_t n,       \
                                                 const void* from) {                               \
    return fw::c_abi::pipeline_at(p).write_back(static_cast<const int##BITS##_t*>(ids), n,         \
                                                static_cast<const char*>(from));                   \
  }                                                                                                \
  FW_DEVICE_C uint64_t fw_block_write_back_rows_##BITS(const void* p, const void* ids, uint64_t n, \
                                                       const void* from) {                         \
    return fw::block::write_back(fw::c_abi::pipeline_at(p),                                        \
                                 static_cast<const int##BITS##_t*>(ids), n,                        \
                                 static_cast<const char*>(from));                                  \
  }

FW_BATCH_FUNCTIONS(32)
FW_BATCH_FUNCTIONS(64)
#undef FW_BATCH_FUNCTIONS

FW_DEVICE_C uint64_t fw_prefetch_seq(const void* p, uint64_t start, uint64_t n, void* to) {
  return fw::c_abi::pipeline_at(p).prefetch_seq(start, n, static_cast<char*>(to));
}
FW_DEVICE_C uint64_t fw_block_prefetch_seq(const void* p, uint64_t start, uint64_t n, void* to) {
  return fw::block::prefetch_seq(fw::c_abi::pipeline_at(p), start, n, static_cast<char*>(to));
}
FW_DEVICE_C uint64_t fw_write_back_seq(const void* p, uint64_t start, uint64_t n,
                                       const void* from) {
  return fw::c_abi::pipeline_at(p).write_back_seq(start, n, static_cast<const char*>(from));
}
FW_DEVICE_C uint64_t fw_block_write_back_seq(const void* p, uint64_t start, uint64_t n,
                                             const void* from) {
  return fw::block::write_back_seq(fw::c_abi::pipeline_at(p), start, n,
                                   static_cast<const char*>(from));
}

// `statuses` may be null.
FW_DEVICE_C uint64_t fw_prefetch_wait(const void* p, uint64_t ticket, void* statuses) {
  return fw::c_abi::pipeline_at(p).prefetch_wait(ticket, static_cast<uint16_t*>(statuses));
}
FW_DEVICE_C uint64_t fw_block_prefetch_wait(const void* p, uint64_t ticket, void* statuses) {
  return fw::block::prefetch_wait(fw::c_abi::pipeline_at(p), ticket,
                                  static_cast<uint16_t*>(statuses));
}
FW_DEVICE_C uint64_t fw_write_back_wait(const void* p, uint64_t ticket, void* statuses) {
  return fw::c_abi::pipeline_at(p).write_back_wait(ticket, static_cast<uint16_t*>(statuses));
}
FW_DEVICE_C uint64_t fw_block_write_back_wait(const void* p, uint64_t ticket, void* statuses) {
  return fw::block::write_back_wait(fw::c_abi::pipeline_at(p), ticket,
                                    static_cast<uint16_t*>(statuses));
}
