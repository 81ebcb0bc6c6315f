// Loops of the baselines that a host language is too slow for: plain system calls, copies of memory
// and calls of the CUDA driver. Nothing of flashwarp takes part.
//
// Compiled by `host.py` to a shared library; each function works on the calling thread
// and returns 0, or what the system or the driver said.
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Copy = int (*)(uint64_t, const void*, size_t, void*);
using Batch = int (*)(uint64_t*, uint64_t*, size_t*, size_t, void*, size_t*, size_t, size_t*,
                      void*);
using Find = int (*)(const char*, void**, int, uint64_t, void*);

// CUmemcpyAttributes: the source is read in the order of the stream.
struct Attributes {
  int source_order = 1;
  int hints[4] = {};
  unsigned flags = 0;
};

constexpr int kNoBatches = -1;
constexpr int kBatchVersion = 12080;

void* symbol(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == nullptr ? nullptr : dlsym(driver, name);
}

}  // namespace

extern "C" {

// Piece i of the memory at `to` is the one at offsets[i] of the file.
int read_pieces(int file, char* to, const int64_t* offsets, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; i++, to += bytes) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t got = pread(file, to + done, bytes - done, offsets[i] + done);
      if (got == 0) return ENODATA;
      if (got < 0 && errno != EINTR) return errno;
      if (got > 0) done += got;
    }
  }
  return 0;
}

int write_pieces(int file, const char* from, const int64_t* offsets, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; i++, from += bytes) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t got = pwrite(file, from + done, bytes - done, offsets[i] + done);
      if (got < 0 && errno != EINTR) return errno;
      if (got > 0) done += got;
    }
  }
  return 0;
}

int copy_pieces(const char* from, char* to, const int64_t* offsets, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; i++) memcpy(to + i * bytes, from + offsets[i], bytes);
  return 0;
}

// Piece i lies at from[i] in host memory and goes to to[i] in that of the GPU: a call for each.
int send_each(const uint64_t* to, const uint64_t* from, int64_t count, int64_t bytes,
              void* stream) {
  static const Copy copy = reinterpret_cast<Copy>(symbol("cuMemcpyHtoDAsync_v2"));
  if (copy == nullptr) return kNoBatches;
  for (int64_t i = 0; i < count; i++) {
    const int result = copy(to[i], reinterpret_cast<const void*>(from[i]), bytes, stream);
    if (result != 0) return result;
  }
  return 0;
}

// The same in one call of the driver.
int send_batch(uint64_t* to, uint64_t* from, int64_t count, int64_t bytes, void* stream) {
  static void* batch = nullptr;
  if (batch == nullptr) {
    const Find find = reinterpret_cast<Find>(symbol("cuGetProcAddress_v2"));
    if (find == nullptr || find("cuMemcpyBatchAsync", &batch, kBatchVersion, 0, nullptr) != 0 ||
        batch == nullptr) {
      return kNoBatches;
    }
  }
  std::vector<size_t> sizes(count, bytes);
  Attributes attributes;
  size_t first = 0, failed = 0;
  return reinterpret_cast<Batch>(batch)(to, from, sizes.data(), count, &attributes, &first, 1,
                                        &failed, stream);
}
}
