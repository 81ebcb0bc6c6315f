// A compiled program for the CPU device, whose kernels the pool runs.
//
// The caller passes compiled code as bytes, so what it has verified is what is loaded. The code
// stays loaded as long as the object lives, which must not end while one of its kernels runs.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "flashwarp/entry.cuh"

namespace fw::native {

class CpuProgram {
 public:
  // Both throw std::runtime_error with the loader's message. A library that is installed with the
  // extension is loaded from its file, which takes a fifth of the time.
  explicit CpuProgram(std::string_view code);
  static std::unique_ptr<CpuProgram> installed(std::string path);
  ~CpuProgram();
  CpuProgram(const CpuProgram&) = delete;
  CpuProgram& operator=(const CpuProgram&) = delete;

  uint32_t kernel_count() const { return table_->count; }
  const entry& kernel(uint32_t index) const { return table_->entries[index]; }

 private:
  CpuProgram(std::string path, int file);

  std::string path_;
  int file_;  // the memory file; -1: the library is installed
  void* library_ = nullptr;
  const entry_table* table_ = nullptr;
};

// The C++ spelling of a mangled name; empty if `name` is not mangled.
std::string demangle(const std::string& name);

}  // namespace fw::native
