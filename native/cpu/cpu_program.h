// A program for the CPU device, compiled apart from it: loaded from memory, run by the pool.
//
// Compiled code is handed over as bytes, so what was verified is what is loaded. It stays loaded as
// long as the object lives; nobody may destroy it while one of its kernels runs.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/cpu_device.h"
#include "flashwarp/entry.cuh"

namespace fw::native {

class CpuProgram {
 public:
  // Both throw std::runtime_error with the loader's words. A library that was installed with the
  // extension is loaded from its file: that needs no memory file, and costs a fifth.
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
  int file_;  // -1: the library has a file of its own
  void* library_ = nullptr;
  const entry_table* table_ = nullptr;
};

// Runs a kernel on up to `threads` threads of the pool (0: all) and returns when all are done;
// false as CpuPool::launch has it. `arguments` points to one argument for each parameter, of the
// size that the entry says.
bool launch_program(CpuPool& pool, const entry& kernel, const void* const* arguments,
                    uint32_t threads, std::vector<Controller*> controllers);

// The C++ spelling of a mangled name; empty when it is none.
std::string demangle(const std::string& name);

}  // namespace fw::native
