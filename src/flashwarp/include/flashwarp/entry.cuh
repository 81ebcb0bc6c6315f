// How the CPU device calls the kernels of a separately compiled program.
//
// The program exports a table, `fw_entries`, with one entry for each kernel: its mangled name, the
// sizes of its parameters, and a function that a thread of the device calls with pointers to the
// arguments. The program has its own `base::this_thread`, so each call passes the caller's.
#pragma once

#include "flashwarp/array.cuh"

namespace fw {

template <typename T>
struct pipeline;

struct entry_param {
  uint32_t bytes;          // of the parameter
  uint32_t element_bytes;  // of the elements that the parameter leads to; 0: not known
};

struct entry {
  const char* name;
  void (*run)(const void* const* arguments, const base::thread_context* here);
  const entry_param* params;
  uint32_t param_count;
  uint32_t context_bytes;  // the program's sizeof(base::thread_context)
};

struct entry_table {
  const entry* entries;
  uint32_t count;
};

namespace detail {

template <typename T>
concept complete = requires { sizeof(T); };

// The size of the elements of an array, pipeline or pointer parameter.
template <typename T>
inline constexpr uint32_t kElementBytes = 0;
template <complete T>
inline constexpr uint32_t kElementBytes<T*> = sizeof(T);
template <typename T, uint32_t kRank>
inline constexpr uint32_t kElementBytes<array<T, kRank>> = sizeof(T);
template <typename T>
inline constexpr uint32_t kElementBytes<pipeline<T>> = sizeof(T);
template <>
inline constexpr uint32_t kElementBytes<void*> = 0;
template <>
inline constexpr uint32_t kElementBytes<const void*> = 0;

template <typename T>
T load_argument(const void* from) {
  static_assert(__is_trivially_copyable(T), "the arguments of a kernel are copied byte by byte");
  // The host's copy may be less aligned than the type.
  struct image {
    unsigned char bytes[sizeof(T)];
  };
  return __builtin_bit_cast(T, *static_cast<const image*>(from));
}

template <auto kKernel>
struct entry_for;
template <typename... Params, void (*kKernel)(Params...)>
struct entry_for<kKernel> {
  static constexpr entry_param kParams[sizeof...(Params) + 1] = {
      {sizeof(Params), kElementBytes<Params>}..., {}};

  struct call {
    explicit call(Params... arguments) { kKernel(arguments...); }
  };

  static void run(const void* const* arguments, const base::thread_context* here) {
    base::this_thread = *here;
    // Braces: they are loaded from left to right.
    call{load_argument<Params>(*arguments++)...};
    base::this_thread = {};
  }
};

}  // namespace detail

template <auto kKernel>
constexpr entry make_entry(const char* name) {
  using maker = detail::entry_for<kKernel>;
  return {name, &maker::run, maker::kParams, sizeof(maker::kParams) / sizeof(entry_param) - 1,
          sizeof(base::thread_context)};
}

}  // namespace fw
