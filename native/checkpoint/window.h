// The choice of the blocks of a checkpoint cache that a new version takes, in one pass.
//
// A cache is one buffer, cut into fragments in address order: versions and gaps. A window is a run
// of fragments that is large enough. The best window is the one that is free soonest, then the one
// whose soonest-needed version is needed last, then the one that evicts the fewest bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

namespace fw::native {

// Of `Fragments::urgency`: a gap is needed by nobody.
inline constexpr int64_t kUrgencyOfGap = std::numeric_limits<int64_t>::max();
// Of `Fragments::ready_ns` and of waits: never, as far as the caller can wait.
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// The columns of the table, each with `count` entries.
struct Fragments {
  const int64_t* nbytes;
  // 0: evictable now. Else the time at which it is expected to be; kNever: nobody can wait for it.
  const int64_t* ready_ns;
  // Larger: needed later.
  const int64_t* urgency;
  // 1: only a restore can free it, and the thread that restores may not wait for that.
  const int64_t* pinned;
  size_t count;
};

struct WindowRequest {
  int64_t nbytes;
  int64_t now_ns;
  // Versions of this urgency or less are not given up.
  int64_t keep_urgency;
};

// Fragments [first, last), and what choosing them costs.
struct Window {
  size_t first, last;
  int64_t wait_ns;
  int64_t urgency;
  int64_t evicted_bytes;
};

std::optional<Window> best_window(const Fragments& fragments, const WindowRequest& request);

}  // namespace fw::native
