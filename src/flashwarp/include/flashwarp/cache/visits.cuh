// Helping: what a waiting warp does with the queues of all arrays on its cache.
//
// A frame that a warp waits for may be in flight for another array, on behalf of a kernel that has
// ended. A fill may also have to write back another array's dirty line. The host frees an array's
// queues when the array closes, and cannot know which kernels use them, since kernels may be
// launched without its knowledge. So a warp that uses another array's queues announces a visit and
// then looks whether the array is attached. The host marks the array as gone and then waits until
// no visitor is left (`Cache.withdraw`). On both sides a sequential fence separates the store from
// the look, so one of the two sees the other. The words lie in the cache's table, which outlives
// its arrays.
#pragma once

#include "flashwarp/cache/line_command.cuh"

namespace fw::cache {

// Whether two entries are of one array: copies of an entry have the same queues.
FW_DEVICE bool same_array(const volume& a, const volume& b) { return a.queues == b.queues; }

// Ends a visit. Release: the visitor's use of the queues is over.
FW_DEVICE void end_visit(volume& v) { atomic::add_release(&v.visitors, ~0u); }

// Begins a visit, by one lane. Returns false if the array is gone. Then there is no visit to end,
// and the array's queues, counters and error record must not be touched.
FW_DEVICE bool begin_visit(volume& v) {
  atomic::add_relaxed(&v.visitors, 1u);
  // Orders the announcement before the look. The other side is the host's mark, before its look at
  // `visitors`.
  atomic::fence_sequential();
  // Acquire: what the host wrote to the entry before it marked it as attached.
  if (atomic::load_acquire(&v.attached) != 0) return true;
  end_visit(v);
  return false;
}

// Begins and ends one visit for all lanes of `here` together.
FW_DEVICE bool begin_visit(volume& v, lanes here) {
  const bool inside = here.leads() && begin_visit(v);
  const bool all = here.broadcast(inside);
  // The leader has acquired the entry for all lanes.
  here.sync();
  return all;
}
FW_DEVICE void end_visit(volume& v, lanes here) {
  // All lanes have left before the leader says so.
  here.sync();
  if (here.leads()) end_visit(v);
}

// The volume that a warp helps at `step` of a wait: its own, and each fourth time all in turn.
FW_DEVICE volume& volume_to_help(line_cache& c, volume& v, uint32_t step) {
  if ((step & 3) != 3) return v;
  const uint32_t end = atomic::load_relaxed(&c.volume_end);
  for (uint32_t i = 0; i < end; i++) {
    volume& candidate = c.volumes[((step >> 2) + warp::index() + i) % end];
    if (atomic::load_acquire(&candidate.attached) != 0) return candidate;
  }
  return v;
}

// The queue pair that a warp helps at `step`: each second time one to which it submits itself,
// where most likely the command lies that it waits for; otherwise all of the volume in turn.
FW_DEVICE nvme::queue_pair& queue_to_help(const volume& v, uint32_t step) {
  const uint32_t turn = step >> 1;
  if ((step & 1) == 0) {
    const uint32_t seat = warp::index() + base::spread_index();
    return v.spread == kOneNamespace ? queue_of(v, seat)
                                     : queue_on(v, seat, turn % v.namespace_count);
  }
  // At times a queue at random (Fibonacci hashing): the turns of queues and volumes could be in
  // step, and some pairs of the two would never come up.
  const uint32_t random = ((warp::index() + step) * 0x9E3779B1u) >> 16;
  return v.queues[((turn & 1) != 0 ? random : warp::index() + (turn >> 1)) % v.queue_count];
}

// Does one step of a wait for a line: drains a queue pair, or pauses. `step` numbers the steps.
FW_DEVICE_NOINLINE void help_any(line_cache& c, volume& v, lanes here, uint32_t step) {
  line_finisher finisher{c};
  // One lane chooses for all: lanes may read different table entries, and be at different steps.
  volume* visited = nullptr;
  uint64_t queue = 0;
  if (here.leads()) {
    volume& target = volume_to_help(c, v, step);
    const bool ours = same_array(target, v);
    if (ours || begin_visit(target)) {
      if (!ours) visited = &target;
      queue = reinterpret_cast<uint64_t>(&queue_to_help(target, step));
    }
  }
  queue = here.broadcast(queue);
  if (queue == 0) {
    // The array has just closed: it has nothing in flight any more.
    base::pause(nvme::kBackOffNs);
    return;
  }
  nvme::help(*reinterpret_cast<nvme::queue_pair*>(queue), here, finisher);
  // All lanes have left the queue before the leader says so.
  here.sync();
  if (visited != nullptr) end_visit(*visited);
}

}  // namespace fw::cache
