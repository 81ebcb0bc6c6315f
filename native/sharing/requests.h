// The owner's end of a client's requests for lines of a shared cache, for host threads; the
// protocol is that of cache/owner_requests.cuh.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "flashwarp/cache/owner_requests.cuh"
#include "storage/storage.h"
#include "transfer/gatherer.h"

namespace fw::native {

// The parts of the shared memory, which begins at a multiple of 64.
struct RequestTable {
  cache::request_bell* bell;
  cache::request_slot* slots;
  char* buffers;
  uint32_t count;
  uint64_t line_bytes;

  static RequestTable at(uint64_t address, uint32_t count, uint64_t line_bytes);
  static uint64_t bytes(uint32_t count, uint64_t line_bytes);

  // What device threads of the client have of it. `holders` is of the client alone: a word a slot.
  cache::owner_requests for_client(uint32_t* holders) const;
};

// One thread waits, and answers.
class RequestServer {
 public:
  // Whether requests come by a `bell`, or the owner must look for them: a GPU cannot wake it.
  RequestServer(uint64_t address, uint32_t count, uint64_t line_bytes, bool bell);

  // Waits for requests, and returns copies of those that are there; none after `stop`.
  std::vector<cache::asked_request> wait();
  // Copy the first `bytes` of each slot's buffer from, or to, memory where they lie back to back.
  void collect(const std::vector<uint32_t>& slots, uint64_t bytes, uint64_t target) const;
  void hand_out(const std::vector<uint32_t>& slots, uint64_t bytes, uint64_t source) const;
  // Reads `bytes` of a storage at each slot's offset into its buffer, by all threads of a gatherer,
  // of which each takes `step` slots at a time. Returns whether all were read.
  bool read(Gatherer& threads, Storage& storage, const std::vector<uint32_t>& slots,
            const std::vector<uint64_t>& offsets, uint64_t bytes, uint64_t step) const;
  void answer(const std::vector<uint32_t>& slots, uint32_t status);
  // Ends `wait`. Any thread.
  void stop();

 private:
  void check(const std::vector<uint32_t>& slots, uint64_t bytes) const;

  const RequestTable table_;
  const bool bell_;
  std::vector<cache::asked_request> found_;
  std::atomic<bool> stopped_{false};
};

}  // namespace fw::native
