// Kernels that use every call on files, for the tests of files on any device.
#include "flashwarp/file.cuh"

// What each request asks for; `got` is the result, `at` where an append went.
struct request {
  uint64_t offset;
  uint64_t nbytes;
  uint64_t buffer;  // where its bytes are in the launch's buffer
  int64_t got;
  uint64_t at;
};

enum call : uint32_t { kRead, kWrite, kAppend, kSync, kReadAround, kWriteAround };

// One thread for each request.
FW_KERNEL by_threads(fw::file f, request* requests, uint64_t count, char* buffer, uint32_t what) {
  const uint64_t threads = fw::base::thread_count();
  for (uint64_t k = fw::base::thread_index(); k < count; k += threads) {
    request& r = requests[k];
    char* const to = buffer + r.buffer;
    if (what == kRead) r.got = fw::read(f, to, r.offset, r.nbytes);
    if (what == kReadAround) r.got = fw::read_around(f, to, r.offset, r.nbytes);
    if (what == kWrite) r.got = fw::write(f, to, r.offset, r.nbytes);
    if (what == kWriteAround) r.got = fw::write_around(f, to, r.offset, r.nbytes);
    if (what == kAppend) r.got = fw::append(f, to, r.nbytes, &r.at);
  }
}

FW_KERNEL by_warps(fw::file f, request* requests, uint64_t count, char* buffer, uint32_t what) {
  for (uint64_t k = fw::warp::index(); k < count; k += fw::warp::count()) {
    const request r = requests[k];
    uint64_t at = 0;
    int64_t got = 0;
    char* const to = buffer + r.buffer;
    if (what == kRead) got = fw::warp::read(f, to, r.offset, r.nbytes);
    if (what == kReadAround) got = fw::warp::read_around(f, to, r.offset, r.nbytes);
    if (what == kWrite) got = fw::warp::write(f, to, r.offset, r.nbytes);
    if (what == kWriteAround) got = fw::warp::write_around(f, to, r.offset, r.nbytes);
    if (what == kAppend) got = fw::warp::append(f, to, r.nbytes, &at);
    if (what == kSync) got = fw::warp::flush(f, r.offset, r.nbytes);
    if (fw::warp::lane() == 0) requests[k].got = got, requests[k].at = at;
  }
}

FW_KERNEL by_blocks(fw::file f, request* requests, uint64_t count, char* buffer, uint32_t what) {
  const uint64_t block = fw::warp::index() / fw::block::warp_count();
  for (uint64_t k = block; k < count; k += fw::block::count()) {
    const request r = requests[k];
    uint64_t at = 0;
    int64_t got = 0;
    char* const to = buffer + r.buffer;
    if (what == kRead) got = fw::block::read(f, to, r.offset, r.nbytes);
    if (what == kReadAround) got = fw::block::read_around(f, to, r.offset, r.nbytes);
    if (what == kWrite) got = fw::block::write(f, to, r.offset, r.nbytes);
    if (what == kWriteAround) got = fw::block::write_around(f, to, r.offset, r.nbytes);
    if (what == kAppend) got = fw::block::append(f, to, r.nbytes, &at);
    if (what == kSync) got = fw::block::flush(f, r.offset, r.nbytes);
    if (fw::block::warp_rank() == 0 && fw::warp::lane() == 0) {
      requests[k].got = got, requests[k].at = at;
    }
  }
}

FW_KERNEL sizes_of(fw::file f, uint64_t* out) {
  if (fw::base::thread_index() != 0) return;
  out[0] = f.size();
  out[1] = f.capacity();
}
