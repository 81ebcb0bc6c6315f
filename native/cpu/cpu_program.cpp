#include "cpu/cpu_program.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace fw::native {
namespace {

int memory_file(std::string_view content) {
  const int file = memfd_create("flashwarp-program", MFD_CLOEXEC);
  if (file < 0) throw std::runtime_error(std::string("memfd_create: ") + std::strerror(errno));
  for (std::size_t done = 0; done < content.size();) {
    const ssize_t moved = write(file, content.data() + done, content.size() - done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) {
      const int error = errno;
      close(file);
      throw std::runtime_error(std::string("writing the program: ") + std::strerror(error));
    }
    done += std::size_t(moved);
  }
  return file;
}

}  // namespace

CpuProgram::CpuProgram(std::string_view code) : CpuProgram("", memory_file(code)) {}

std::unique_ptr<CpuProgram> CpuProgram::installed(std::string path) {
  return std::unique_ptr<CpuProgram>(new CpuProgram(std::move(path), -1));
}

CpuProgram::CpuProgram(std::string path, int file) : path_(std::move(path)), file_(file) {
  if (file_ >= 0) path_ = "/proc/self/fd/" + std::to_string(file_);
  library_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    const std::string why = dlerror();
    if (file_ >= 0) close(file_);
    throw std::runtime_error(why);
  }
  table_ = static_cast<const entry_table*>(dlsym(library_, "fw_entries"));
  bool fits = table_ != nullptr;
  for (uint32_t i = 0; fits && i < table_->count; i++) {
    fits = table_->entries[i].context_bytes == sizeof(base::thread_context);
  }
  if (!fits) {
    dlclose(library_);
    if (file_ >= 0) close(file_);
    throw std::runtime_error("the program was not compiled for this version of flashwarp");
  }
}

CpuProgram::~CpuProgram() {
  dlclose(library_);
  if (file_ < 0) return;
  // The loader identifies libraries by path, which contains the descriptor's number. If it could
  // not unload the code (because of thread-local destructors, for example), keep the number in use:
  // the loader would take a later program with the same number for this one.
  void* still = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (still == nullptr) close(file_);
}

std::string demangle(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : "";
  std::free(text);
  return result;
}

}  // namespace fw::native
