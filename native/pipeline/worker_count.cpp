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
  const double ns_per_byte = period_ns / double(window.nbytes);
  const double busy = double(window.io_ns) / period_ns;

  const uint32_t before = std::exchange(state.before, 0);
  if (before > state.count && before <= limits.high) {
    if (ns_per_byte > kSlowedFactor * state.before_ns_per_byte) {
      state.count = before;
      state.calm = 0;
      state.patience = std::min(2 * state.patience, kPatienceMax);
      state.reason = WorkerReason::kSlowed;
      return state;
    }
    state.patience = kPatienceMin;
  }
  if (busy >= kBusyShare) {
    state.calm = 0;
    if (state.count != limits.high) {
      state.count = limits.high;
      state.reason = WorkerReason::kIoBound;
    }
    return state;
  }
  const auto enough = uint32_t(std::ceil(busy * state.count / kFilledShare));
  const uint32_t target = std::max(limits.low, enough);
  if (target >= state.count) {
    state.calm = 0;
  } else if (++state.calm >= state.patience) {
    state.before = state.count;
    state.before_ns_per_byte = ns_per_byte;
    state.count = target;
    state.calm = 0;
    state.reason = WorkerReason::kIdle;
  }
  return state;
}

}  // namespace fw::native::pipeline
