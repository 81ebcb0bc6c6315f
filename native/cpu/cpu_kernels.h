// The CPU device's table of built-in kernels: the same text that NVRTC compiles for a GPU.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

namespace fw::native {

struct CpuKernel {
  std::string_view name;            // as the GPU module names it: "fw_gather_rows"
  std::size_t params_bytes;         // of the one parameter struct
  void (*run)(const void* params);  // one thread's part; base::this_thread says which
};

// Null when there is no kernel of that name.
const CpuKernel* find_cpu_kernel(std::string_view name);
std::vector<std::string_view> cpu_kernel_names();

// Sizes and member offsets of every structure that Python mirrors, for the test that compares them.
struct MemberLayout {
  const char* structure;
  const char* member;  // empty: the entry gives the size
  std::size_t bytes;
};
const std::vector<MemberLayout>& structure_layouts();

}  // namespace fw::native
