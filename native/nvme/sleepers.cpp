#include "nvme/sleepers.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace fw::native {

void Sleepers::wake() {
  wakes_.fetch_add(1, std::memory_order_relaxed);
  // Sequential: either the sleeper sees the new epoch and does not wait, or this sees the sleeper.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(epoch_);
}

bool Sleepers::sleep(uint32_t seen, int64_t limit_ns) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  sleeps_.fetch_add(1, std::memory_order_relaxed);
  futex_wait(epoch_, seen, limit_ns);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return epoch() != seen;
}

void WakeCall::wake(void* call) {
  for (const auto& sleepers : static_cast<WakeCall*>(call)->all_) sleepers->wake();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t limit_ns, bool shared) {
  const timespec limit = {limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE,
          seen, limit_ns == 0 ? nullptr : &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr,
          nullptr, 0);
}

}  // namespace fw::native
