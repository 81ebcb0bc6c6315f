// Arrays for kernels of other compilers: functions with C linkage, linked as LTO-IR.
//
// The other compiler passes the address of an array's struct. Elements are loaded to and stored
// from memory as bytes, so one function serves all types of a size. Link-time optimization makes a
// load as fast as with `fw::array`: no call remains, and no memory for the struct.
#pragma once

#include "flashwarp/array.cuh"

namespace fw::c_abi {

template <typename T>
FW_DEVICE const array<T>& array_at(const void* address) {
  return *static_cast<const array<T>*>(address);
}

// The states of the last `kTracked` tokens that one call site of a kernel has started. The other
// compiler copies tokens as values, so their states are kept here. To ask about an older token
// waits for it, each time.
inline constexpr uint32_t kTracked = 8;

struct token_site {
  uint64_t started;
  struct {
    uint64_t number;
    token state;
  } last[kTracked];
};

struct started_token {
  token first;  // its state at the start
  token_site* site;
  uint64_t number;
};
static_assert(sizeof(token) == 64);
static_assert(sizeof(token_site) == 8 + kTracked * 72);
static_assert(sizeof(started_token) == 80);

FW_DEVICE void start(void* to, void* call_site, const token& t) {
  token_site* site = static_cast<token_site*>(call_site);
  const uint64_t number = ++site->started;
  site->last[number % kTracked] = {number, t};
  *static_cast<started_token*>(to) = {t, site, number};
}

// Calls what(state, known) with the token's state. If the token is too old, `state` is its state at
// the start, and `known` is false.
template <typename What>
FW_DEVICE auto with(const void* started, What what) {
  const started_token* t = static_cast<const started_token*>(started);
  auto& last = t->site->last[t->number % kTracked];
  if (last.number == t->number) return what(last.state, true);
  token state = t->first;
  return what(state, false);
}

}  // namespace fw::c_abi

#define FW_ELEMENT_FUNCTIONS(BYTES, WORD)                                                     \
  FW_DEVICE_C void fw_load_##BYTES(const void* a, uint64_t i, void* to) {                     \
    *static_cast<WORD*>(to) = fw::c_abi::array_at<const WORD>(a)[i];                          \
  }                                                                                           \
  FW_DEVICE_C void fw_store_##BYTES(const void* a, uint64_t i, const void* from) {            \
    fw::c_abi::array_at<WORD>(a).store(i, *static_cast<const WORD*>(from));                   \
  }                                                                                           \
  FW_DEVICE_C void fw_prefetch_##BYTES(const void* a, uint64_t i) {                           \
    fw::c_abi::array_at<const WORD>(a).prefetch(i);                                           \
  }                                                                                           \
  FW_DEVICE_C void fw_fetch_async_##BYTES(const void* a, uint64_t i, uint64_t n, void* site,  \
                                          void* to) {                                         \
    fw::c_abi::start(to, site, fw::c_abi::array_at<const WORD>(a).prefetch(i, n));            \
  }                                                                                           \
  FW_DEVICE_C void fw_read_async_##BYTES(const void* a, uint64_t i, uint64_t n, void* buffer, \
                                         void* site, void* to) {                              \
    fw::c_abi::start(                                                                         \
        to, site,                                                                             \
        fw::c_abi::array_at<const WORD>(a).read_async(i, n, static_cast<WORD*>(buffer)));     \
  }                                                                                           \
  FW_DEVICE_C void fw_write_async_##BYTES(const void* a, uint64_t i, uint64_t n,              \
                                          const void* buffer, void* site, void* to) {         \
    fw::c_abi::start(                                                                         \
        to, site,                                                                             \
        fw::c_abi::array_at<WORD>(a).write_async(i, n, static_cast<const WORD*>(buffer)));    \
  }

FW_ELEMENT_FUNCTIONS(1, uint8_t)
FW_ELEMENT_FUNCTIONS(2, uint16_t)
FW_ELEMENT_FUNCTIONS(4, uint32_t)
FW_ELEMENT_FUNCTIONS(8, uint64_t)
FW_ELEMENT_FUNCTIONS(16, fw::atomic::word16)

#define FW_ATOMIC_FUNCTION(NAME, TYPE)                                                \
  FW_DEVICE_C void fw_atomic_add_##NAME(const void* a, uint64_t i, const void* value, \
                                        void* before) {                               \
    *static_cast<TYPE*>(before) =                                                     \
        fw::c_abi::array_at<TYPE>(a).atomic_add(i, *static_cast<const TYPE*>(value)); \
  }

FW_ATOMIC_FUNCTION(int32, int32_t)
FW_ATOMIC_FUNCTION(uint32, uint32_t)
FW_ATOMIC_FUNCTION(int64, int64_t)
FW_ATOMIC_FUNCTION(uint64, uint64_t)
FW_ATOMIC_FUNCTION(float32, float)
FW_ATOMIC_FUNCTION(float64, double)

// Tokens: as the methods of fw::token.
FW_DEVICE_C bool fw_token_done(const void* t) {
  return fw::c_abi::with(t, [](fw::token& state, bool known) {
    // `done` counts its calls in the state, which is not kept here.
    if (!known) state.wait();
    return state.done();
  });
}
FW_DEVICE_C uint32_t fw_token_wait(const void* t) {
  return fw::c_abi::with(t, [](fw::token& state, bool) { return state.wait(); });
}
FW_DEVICE_C uint32_t fw_token_status(const void* t) {
  return fw::c_abi::with(t, [](fw::token& state, bool) { return state.status(); });
}
