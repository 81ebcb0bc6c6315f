// The lanes that call a function of an array together, and how they go on together.
#pragma once

#include "flashwarp/cache/access.cuh"

namespace fw {

using policy = FW_POLICY;

namespace detail {

// The active lanes that use the same array. Only these cooperate, because each array has queues of
// its own.
FW_DEVICE lanes active_on(const cache::volume* v) {
  return warp::active().match(reinterpret_cast<uint64_t>(v));
}

// Runs `slow` in the lanes that need it. All lanes of `here` call, and go on together; the caller
// takes `here` before any lane looks at the cache. The compiler may not reconverge lanes after such
// a call, because the callee saves the registers that say which lanes are waited for. Without the
// sync, the rest of the kernel would run once for each lane.
template <typename Slow>
FW_DEVICE void call_for(lanes here, bool needed, Slow slow) {
  if (!here.any(needed)) return;
  if (needed) slow();
  here.sync();
}

}  // namespace detail

}  // namespace fw
