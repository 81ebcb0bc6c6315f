#include "transfer/host_copier.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/fault_guard.h"

namespace fw::native {
namespace {

using Clock = std::chrono::steady_clock;

// A stop is noticed after this much, about a millisecond.
constexpr uint64_t kCopyStepBytes = uint64_t(8) << 20;

// A wait for a word asks without a pause for as long, then with pauses.
constexpr std::chrono::microseconds kWordAskedWithoutPause{50};
constexpr std::chrono::microseconds kWordPause{20};

std::atomic_ref<uint64_t> word_at(uint64_t address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address));
}

// Whether all of it was copied. A source that is a mapped file may have lost its pages.
bool copy_step(uint64_t target, uint64_t source, uint64_t nbytes, bool guarded) {
  auto* const to = reinterpret_cast<void*>(target);
  const auto* const from = reinterpret_cast<const void*>(source);
  if (!guarded) {
    std::memmove(to, from, nbytes);
    return true;
  }
  GuardedCopy step = {to, from, nbytes, CopyResult::kCopied};
  guarded_copy(&step, 1);
  return step.result != CopyResult::kFailed;
}

bool overlap(const CopyPiece& piece) {
  const uint64_t distance =
      piece.target > piece.source ? piece.target - piece.source : piece.source - piece.target;
  return distance < piece.nbytes;
}

}  // namespace

HostCopier::HostCopier() = default;

HostCopier::~HostCopier() {
  if (fork_guard_.in_child()) {
    // The thread exists in the parent only; destroying what it waits on would wait for it.
    (void)state_.release();
    return;
  }
  stop();
}

uint64_t HostCopier::copy(std::vector<CopyPiece> pieces) {
  Job job;
  job.pieces = std::move(pieces);
  return queue(std::move(job));
}

uint64_t HostCopier::wait_word(uint64_t word, uint64_t value) {
  return queue({Job::Kind::kWait, 0, {}, word, value});
}

uint64_t HostCopier::write_word(uint64_t word, uint64_t value) {
  return queue({Job::Kind::kWrite, 0, {}, word, value});
}

uint64_t HostCopier::queue(Job job) {
  if (fork_guard_.in_child()) throw std::runtime_error("the copier belongs to the parent process");
  const std::lock_guard guard(state_->lock);
  if (state_->stopping) throw std::runtime_error("the copier was stopped");
  if (!state_->thread.joinable()) state_->thread = std::thread([this] { run(); });
  job.number = ++state_->queued;
  state_->jobs.push_back(std::move(job));
  state_->work.notify_one();
  return state_->queued;
}

// Acquire: who sees that a copy has ended sees its bytes.
uint64_t HostCopier::ended() const { return state_->ended.load(std::memory_order_acquire); }

uint64_t HostCopier::ended_address() const {
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
  return reinterpret_cast<uint64_t>(&state_->ended);
}

bool HostCopier::wait(uint64_t number, int64_t microseconds) const {
  std::unique_lock guard(state_->lock);
  return state_->moved.wait_for(guard, std::chrono::microseconds(microseconds),
                                [&] { return ended() >= number; });
}

std::vector<HostCopier::Ended> HostCopier::results() const {
  const std::lock_guard guard(state_->lock);
  return {state_->results.begin(), state_->results.end()};
}

void HostCopier::forget(uint64_t last_number) {
  const std::lock_guard guard(state_->lock);
  auto& results = state_->results;
  while (!results.empty() && results.front().number <= last_number) results.pop_front();
}

bool HostCopier::stopping() const {
  const std::lock_guard guard(state_->lock);
  return state_->stopping;
}

void HostCopier::stop() {
  if (fork_guard_.in_child()) return;
  std::thread ending;
  {
    const std::lock_guard guard(state_->lock);
    state_->stopping = true;
    ending = std::move(state_->thread);
  }
  state_->work.notify_all();
  if (ending.joinable()) ending.join();
  const std::lock_guard guard(state_->lock);
  for (const Job& job : state_->jobs) {
    state_->results.push_back({job.number, kNone, 0, true});
    state_->ended.store(job.number, std::memory_order_release);
  }
  state_->jobs.clear();
  state_->moved.notify_all();
}

void HostCopier::run() {
  const GuardedVisit visit;
  std::unique_lock guard(state_->lock);
  while (true) {
    state_->work.wait(guard, [this] { return state_->stopping || !state_->jobs.empty(); });
    if (state_->stopping) return;
    const Job job = std::move(state_->jobs.front());
    state_->jobs.pop_front();
    guard.unlock();
    const Ended ended = run_job(job);
    guard.lock();
    state_->results.push_back(ended);
    state_->ended.store(job.number, std::memory_order_release);
    state_->moved.notify_all();
  }
}

HostCopier::Ended HostCopier::run_job(const Job& job) {
  Ended result;
  result.number = job.number;
  const auto begin = Clock::now();
  if (job.kind == Job::Kind::kWrite) {
    // Release: whoever reads the word with acquire sees the copies before it.
    word_at(job.word).store(job.value, std::memory_order_release);
  } else if (job.kind == Job::Kind::kWait) {
    // Acquire: copies after it see what the thread that stored the word has written before.
    while (word_at(job.word).load(std::memory_order_acquire) < job.value) {
      if (stopping()) {
        result.withdrawn = true;
        break;
      }
      if (Clock::now() - begin > kWordAskedWithoutPause) std::this_thread::sleep_for(kWordPause);
    }
  } else {
    const bool can_guard = install_fault_guard();
    for (size_t i = 0; i < job.pieces.size() && result.failed == kNone; ++i) {
      const CopyPiece& piece = job.pieces[i];
      const bool guarded = can_guard && !overlap(piece);
      for (uint64_t at = 0; at < piece.nbytes && result.failed == kNone;) {
        // Of what overlaps, parts must not be copied one after another.
        const uint64_t step =
            overlap(piece) ? piece.nbytes : std::min(kCopyStepBytes, piece.nbytes - at);
        if (stopping()) result.withdrawn = true;
        if (result.withdrawn) return result;
        if (!copy_step(piece.target + at, piece.source + at, step, guarded)) {
          result.failed = int64_t(i);
        }
        at += step;
      }
    }
  }
  result.nanoseconds =
      uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
  return result;
}

}  // namespace fw::native
