// The lanes that call a function of an array together, and how they go on together.
#pragma once

#include "flashwarp/cache/access.cuh"

namespace fw {

using policy = FW_POLICY;

namespace detail {

// The active lanes that use the same array. Only these cooperate, because each array has queues of
// its own.
FW_DEVICE uint32_t active_on(const cache::volume* v) {
  return warp::match(warp::active(), reinterpret_cast<uint64_t>(v));
}

// Runs `slow` in the lanes that need it. All lanes of `here` call, and go on together; the caller
// takes `here` before any lane looks at the cache. The compiler may not reconverge lanes after such
// a call, because the callee saves the registers that say which lanes are waited for. Without the
// sync, the rest of the kernel would run once for each lane.
template <typename Slow>
FW_DEVICE void call_for(uint32_t here, bool needed, Slow slow) {
  if (!warp::any(here, needed)) return;
  if (needed) slow();
  warp::sync(here);
}

}  // namespace detail

}  // namespace fw
