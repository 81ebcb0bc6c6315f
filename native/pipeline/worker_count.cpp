#include "pipeline/worker_count.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace fw::native::pipeline {

WorkerState decide_workers(WorkerState state, const WorkerWindow& window,
                           const WorkerLimits& limits) {
  state.reason = WorkerReason::kNone;
  state.count = std::clamp(state.count, limits.low, limits.high);
  const auto period_ns = double(window.io_ns + window.idle_ns);
  if (period_ns <= 0 || window.nbytes == 0) return state;
  const double io = double(window.io_ns) / double(window.nbytes);
  const double idle = double(window.idle_ns) / double(window.nbytes);
  const double busy = double(window.io_ns) / period_ns;

  const auto change = [&](uint32_t count, WorkerReason reason) {
    state.before = state.count;
    state.before_io = io;
    state.before_idle = idle;
    state.count = count;
    state.calm = 0;
    state.reason = reason;
  };
  const uint32_t before = std::exchange(state.before, 0);
  if (before >= limits.low && before <= limits.high && before != state.count) {
    const double time_before = state.before_io + state.before_idle;
    if (io + std::min(idle, state.before_idle) > kSlowedFactor * time_before) {
      // Of too many workers, such as on more cores than there are, or of too few.
      if (before < state.count) state.hold = state.patience;
      state.patience = std::min(2 * state.patience, kPatienceMax);
      change(before, WorkerReason::kSlowed);
      state.before = 0;
      return state;
    }
    state.patience = kPatienceMin;
  }
  if (busy >= kBusyShare) {
    state.calm = 0;
    if (state.hold != 0) {
      --state.hold;
    } else if (state.count != limits.high) {
      change(limits.high, WorkerReason::kIoBound);
    }
    return state;
  }
  state.hold = 0;
  const auto enough = uint32_t(std::ceil(busy * state.count / kFilledShare));
  const uint32_t target = std::max(limits.low, enough);
  if (target >= state.count) {
    state.calm = 0;
  } else if (++state.calm >= state.patience) {
    change(target, WorkerReason::kIdle);
  }
  return state;
}

}  // namespace fw::native::pipeline
