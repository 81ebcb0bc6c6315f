#include "nvme/software/heart.h"

#include <atomic>
#include <chrono>
#include <utility>

#include "flashwarp/nvme/queue_pair.cuh"

namespace fw::native {
namespace {

constexpr std::chrono::nanoseconds kBeat(nvme::kBeatNs);
// From a look to the next. Each costs a timer interrupt, tens of microseconds in a virtual machine,
// so every second one is a beat.
constexpr std::chrono::nanoseconds kLook = kBeat / 2;

}  // namespace

Heart& Heart::of_process() {
  static std::atomic<Heart*> current{nullptr};
  Heart* seen = current.load(std::memory_order_acquire);
  // Never destroyed: controllers may stop while the process ends, and what a child has of its
  // parent's can be neither locked nor joined.
  while (seen == nullptr || seen->fork_guard_.in_child()) {
    auto* made = new Heart();
    if (current.compare_exchange_strong(seen, made, std::memory_order_acq_rel)) return *made;
    delete made;
  }
  return *seen;
}

uint32_t* Heart::shared_word() {
  alignas(128) static uint32_t word = 0;
  return &word;
}

void Heart::add(uint32_t* word) {
  const std::lock_guard guard(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this, mine = current_] { beat(mine); });
  // Kernels may look before the next beat.
  if (++words_[word] == 1) std::atomic_ref(*word).store(beats_, std::memory_order_relaxed);
}

void Heart::remove(uint32_t* word) {
  std::thread ended;
  {
    const std::lock_guard guard(mutex_);
    if (--words_[word] != 0) return;
    words_.erase(word);
    std::atomic_ref(*word).store(0, std::memory_order_relaxed);
    if (!words_.empty()) return;
    ++current_;
    ended = std::move(thread_);
  }
  ends_.notify_all();
  ended.join();
}

void Heart::watch(const void* who, std::function<void()> look) {
  const std::lock_guard guard(mutex_);
  // The thread may be in a wait that is too long for the first one.
  if (looks_.empty()) ends_.notify_all();
  looks_[who] = std::move(look);
}

void Heart::unwatch(const void* who) {
  const std::lock_guard guard(mutex_);
  looks_.erase(who);
}

void Heart::beat(uint32_t thread) {
  using std::chrono::steady_clock;
  std::unique_lock guard(mutex_);
  steady_clock::time_point next = steady_clock::now();
  while (current_ == thread) {
    const steady_clock::time_point now = steady_clock::now();
    // Not more often: who waits counts beats.
    if (now >= next) {
      next = now + kBeat;
      // 0 means that there is no heartbeat.
      if (++beats_ == 0) beats_ = 1;
      // Relaxed: it orders nothing.
      for (const auto& [word, added] : words_) {
        std::atomic_ref(*word).store(beats_, std::memory_order_relaxed);
      }
    }
    for (const auto& [who, look] : looks_) look();
    const steady_clock::time_point between = next - kLook;
    ends_.wait_until(guard, looks_.empty() || now >= between ? next : between);
  }
}

}  // namespace fw::native
