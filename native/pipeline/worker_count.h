// How many workers serve batches: decided from the time that I/O takes and the time between.
//
// Pure arithmetic: the engine measures a window of batches, asks, and follows.
#pragma once

#include <cstdint>

namespace fw::native::pipeline {

struct WorkerLimits {
  uint32_t low = 1;
  uint32_t high = 1;
};

// A window of batches. `io_ns` is the time in which workers had something to move, `idle_ns` the
// rest: the submitter computed, and no batch, or no free chunk of the ring, was there.
struct WorkerWindow {
  int64_t io_ns = 0;
  int64_t idle_ns = 0;
  uint64_t nbytes = 0;
};

enum class WorkerReason : uint8_t {
  kNone,     // the count stays
  kIoBound,  // workers had no pause, so the submitter waits for them: all that are allowed
  kIdle,     // so few are enough, even if I/O took as much longer as there are fewer
  kSlowed,   // batches came later with another count: back
};

struct WorkerState {
  uint32_t count = 1;
  uint32_t calm = 0;       // windows in a row for which fewer would be enough
  uint32_t patience = 3;   // windows that it takes to have fewer
  uint32_t before = 0;     // the count before the last change; 0: it has been judged
  double before_io = 0;    // I/O of a byte then, in ns
  double before_idle = 0;  // and the pauses
  uint32_t hold = 0;       // windows for which more are not tried again
  WorkerReason reason = WorkerReason::kNone;  // of the last decision
};

// Workers are busy from this share of a window on.
inline constexpr double kBusyShare = 0.95;
// Fewer workers may fill this share of it at most. Less than the above, so that a steady load has a
// steady count.
inline constexpr double kFilledShare = 0.85;
// Batches that take longer by this factor were slowed. A pause that became longer does not count:
// the submitter made it, such as between two epochs.
inline constexpr double kSlowedFactor = 1.03;
inline constexpr uint32_t kPatienceMin = 3;
inline constexpr uint32_t kPatienceMax = 64;

// The state after a window. More workers come at once, because too few cost time; fewer come after
// `patience` windows. A change that makes batches slower is taken back, and then patience doubles.
WorkerState decide_workers(WorkerState state, const WorkerWindow& window,
                           const WorkerLimits& limits);

}  // namespace fw::native::pipeline
