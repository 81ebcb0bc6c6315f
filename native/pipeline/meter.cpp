// Windows of batches; see core.h.
#include "pipeline/core.h"

namespace fw::native::pipeline {
namespace {

// A window has so many batches and lasts so long at least: shorter ones are noise.
constexpr uint32_t kWindowBatches = 8;
constexpr int64_t kWindowNs = 4'000'000;
// Nobody pipelines over a longer pause: the window begins again.
constexpr int64_t kPauseNs = 2'000'000'000;
constexpr size_t kDecisionsMax = 1024;

}  // namespace

Meter::Meter(const WorkerLimits& limits, uint32_t first) : limits_(limits), active_(first) {
  state_.count = first;
}

// Counts the time since the last event for what was the case meanwhile.
void Meter::advance(int64_t now_ns) {
  const int64_t passed = last_ns_ == 0 ? 0 : now_ns - last_ns_;
  last_ns_ = now_ns;
  if (open_ != 0) {
    window_.io_ns += passed;
    io_ns_ += passed;
  } else if (passed > kPauseNs) {
    window_ = {};
    batches_ = 0;
  } else {
    window_.idle_ns += passed;
    idle_ns_ += passed;
  }
}

void Meter::chunk_opens(int64_t now_ns) {
  const std::lock_guard guard(lock_);
  advance(now_ns);
  ++open_;
}

void Meter::chunk_closes(int64_t now_ns) {
  const std::lock_guard guard(lock_);
  advance(now_ns);
  --open_;
}

bool Meter::batch_ends(int64_t now_ns, uint64_t nbytes) {
  const std::lock_guard guard(lock_);
  advance(now_ns);
  window_.nbytes += nbytes;
  ++batches_;
  if (batches_ < kWindowBatches || window_.io_ns + window_.idle_ns < kWindowNs) return false;
  const uint32_t before = state_.count;
  state_ = decide_workers(state_, window_, limits_);
  if (state_.count != before) {
    decisions_.push_back(
        {now_ns, before, state_.count, state_.reason, window_.io_ns, window_.idle_ns});
    ++decision_count_;
    if (decisions_.size() > kDecisionsMax) decisions_.pop_front();
  }
  window_ = {};
  batches_ = 0;
  // Relaxed: a worker that sees it late takes a part more, or wakes up later.
  active_.store(state_.count, std::memory_order_relaxed);
  return state_.count != before;
}

void Meter::read(EngineStats& stats) const {
  const std::lock_guard guard(lock_);
  stats.workers = state_.count;
  stats.io_ns = io_ns_;
  stats.idle_ns = idle_ns_;
  stats.decisions.assign(decisions_.begin(), decisions_.end());
  stats.decision_count = decision_count_;
}

}  // namespace fw::native::pipeline
