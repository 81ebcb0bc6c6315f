// Both ends of a client's requests to the owner of a shared cache, for host threads; the protocol
// is that of cache/owner_requests.cuh.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "flashwarp/cache/owner_requests.cuh"

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
};

// The owner's end. One thread waits, and answers.
class RequestServer {
 public:
  RequestServer(uint64_t address, uint32_t count, uint64_t line_bytes);

  // Waits for requests, and returns copies of those that are there; none after `stop`.
  std::vector<cache::asked_request> wait();
  // Copy the first `bytes` of each slot's buffer from, or to, memory where they lie back to back.
  void collect(const std::vector<uint32_t>& slots, uint64_t bytes, uint64_t target) const;
  void hand_out(const std::vector<uint32_t>& slots, uint64_t bytes, uint64_t source) const;
  void answer(const std::vector<uint32_t>& slots, uint32_t status);
  // Ends `wait`. Any thread.
  void stop();

 private:
  void check(const std::vector<uint32_t>& slots, uint64_t bytes) const;

  const RequestTable table_;
  std::vector<cache::asked_request> found_;
  std::atomic<bool> stopped_{false};
};

// The client's end: what its device threads use, at `address`, and moves by a host thread.
class RequestClient {
 public:
  RequestClient(uint64_t address, uint32_t count, uint64_t line_bytes);

  uint64_t address() const { return reinterpret_cast<uint64_t>(&requests_); }

  // Asks for each of `count` moves, with as many under way as there are slots, and waits for all.
  // The bytes of the moves lie back to back at `memory`; a prefetch has none. Returns the first
  // status that is no success: kTimedOut if nothing was answered for `limit_ns`, or after `lose`.
  uint32_t move(cache::owner_operation operation, const uint64_t* begins, const uint64_t* sizes,
                uint64_t count, char* memory, uint64_t limit_ns);
  // Ends all waits of `move`: the owner has gone. Any thread.
  void lose() { lost_.store(true, std::memory_order_relaxed); }

 private:
  std::unique_ptr<uint32_t[]> holders_;
  cache::owner_requests requests_;
  std::atomic<bool> lost_{false};
};

}  // namespace fw::native
