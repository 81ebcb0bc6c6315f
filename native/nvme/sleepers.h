// The sleep of a controller's threads, and the calls that end it.
//
// Threads sleep until the epoch changes. Shared, so that whoever wakes them may outlive the
// controller: without threads a call changes a number and nothing else.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fw::native {

class Sleepers {
 public:
  // Ends the sleep of all threads. Any thread; two atomic additions if none sleeps.
  void wake();

  // A thread that has work until now takes the epoch before it looks for the last time.
  uint32_t epoch() const { return epoch_.load(std::memory_order_seq_cst); }

  // Sleeps until the epoch is not `seen`, at most `limit_ns` nanoseconds; 0: without limit. Returns
  // whether the epoch has changed.
  bool sleep(uint32_t seen, int64_t limit_ns);

  bool any() const { return sleepers_.load(std::memory_order_relaxed) != 0; }
  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }
  uint64_t wakes() const { return wakes_.load(std::memory_order_relaxed); }

 private:
  alignas(128) std::atomic<uint32_t> epoch_{0};  // a futex
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<uint64_t> wakes_{0};
};

// Wakes controllers through a plain C function, as a host node of a CUDA graph needs it:
// `function()` with `argument()`. Both may be used as long as this object lives, by any thread,
// also after the controllers have stopped or are gone. The call needs no interpreter and makes no
// call of CUDA.
class WakeCall {
 public:
  explicit WakeCall(std::vector<std::shared_ptr<Sleepers>> all) : all_(std::move(all)) {}
  WakeCall(const WakeCall&) = delete;
  WakeCall& operator=(const WakeCall&) = delete;

  static void (*function())(void*) { return &wake; }
  void* argument() { return this; }

 private:
  static void wake(void* call);

  const std::vector<std::shared_ptr<Sleepers>> all_;
};

// Sleeps until `word` is not `seen`, at most `limit_ns` nanoseconds; 0: without limit. May return
// early. A `shared` word lies in memory that other processes map.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t limit_ns, bool shared = false);
void futex_wake_all(std::atomic<uint32_t>& word);

}  // namespace fw::native
