// Lines that were cached before another program was let to write the file: no kernel that begins
// afterwards serves them.
//
// A file that is read in place has a lease. When a writer comes, the host first changes the path of
// all queue pairs and then stores a new epoch; only then may the writer go on. When no writer has
// the file open any more, the host stores one more. Kernels compare the epoch with 0 as they begin,
// which is all that an array costs whose lease has never been broken. Later they compare it with
// the epoch of the last sweep. If that is older, the warps that notice it empty the array's frames
// together, in chunks, and wait for each other. So this needs no call of the host's, and a CUDA
// graph that is replayed without one obeys.
#pragma once

#include "flashwarp/cache/write_back.cuh"

namespace fw::cache {

// Frames that a warp sweeps at a time: enough that the counters cost little, few enough that all
// warps get some.
inline constexpr uint32_t kSweepRounds = 16;
inline constexpr uint64_t kSweepWays = uint64_t(kSweepRounds) * warp::kWarpWidth;

// The epoch of the volume's file: 0 until a writer has come. Relaxed: `sweep` has the fence.
FW_DEVICE uint32_t epoch_of(const volume& v) {
  return v.lease == nullptr ? 0 : atomic::load_relaxed_system(&v.lease->epoch);
}

// Whether epoch `a` is before `b`.
FW_HOST_DEVICE bool is_before(uint32_t a, uint32_t b) { return int32_t(a - b) < 0; }

// Takes the next number below `end` that `counter` has for `epoch`: its upper half is the epoch for
// which it counts. Returns `end` if none is left, or if it counts for a later epoch. One lane.
FW_DEVICE uint32_t take_number(uint64_t* counter, uint32_t epoch, uint32_t end) {
  while (true) {
    const uint64_t seen = atomic::load_relaxed(counter);
    const uint32_t counts_for = uint32_t(seen >> 32);
    if (is_before(epoch, counts_for)) return end;
    const uint32_t number = counts_for == epoch ? uint32_t(seen) : 0;
    if (number >= end) return end;
    // Acquire and release: who takes the last number of `done` has all that the others emptied.
    if (atomic::cas_acq_rel(counter, seen, uint64_t(epoch) << 32 | (number + 1))) return number;
  }
}

// Empties the frames of one chunk. Returns false if a wait ran out of time.
FW_DEVICE bool sweep_chunk(line_cache& c, volume& v, lanes here, uint32_t chunk) {
  const uint64_t ways = c.geometry.set_count * c.geometry.ways;
  const uint64_t begin = chunk * kSweepWays;
  const uint64_t end = begin + kSweepWays < ways ? begin + kSweepWays : ways;
  bool swept = true;
  for (uint64_t first = begin; first < end; first += here.count()) {
    const uint64_t way = first + here.rank();
    swept = invalidate_ways(c, v, here, way < end, way, false) && swept;
  }
  return swept;
}

// Notes that all frames were emptied after `epoch` had begun. One lane.
FW_DEVICE void note_swept(lease& l, uint32_t epoch) {
  while (true) {
    const uint32_t seen = atomic::load_relaxed(&l.swept);
    // A later sweep has gone past ours.
    if (!is_before(seen, epoch)) return;
    // Release: every tag that the sweep emptied comes before.
    if (atomic::cas_acq_rel(&l.swept, seen, epoch)) return;
  }
}

// Sweeps with the other warps that have noticed the epoch, unless that is done. Holds nothing.
FW_DEVICE_NOINLINE void sweep(line_cache& c, volume& v, lanes here) {
  lease& l = *v.lease;
  const bool leads = here.leads();
  const uint32_t epoch = here.broadcast(epoch_of(v));
  // Acquire the epoch: who goes on from here sees the path that was stored before it.
  atomic::fence_system();
  const uint64_t ways = c.geometry.set_count * c.geometry.ways;
  const uint32_t chunks = uint32_t((ways + kSweepWays - 1) / kSweepWays);
  nvme::deadline limit(v.queues[0].data);
  uint32_t step = 0;
  while (true) {
    // Acquire: what the sweep has emptied is not found again.
    const bool pending = leads && is_before(atomic::load_acquire(&l.swept), epoch);
    if (!here.any(pending)) break;
    const uint32_t taken = leads ? take_number(&l.next, epoch, chunks) : 0;
    const uint32_t chunk = here.broadcast(taken);
    if (chunk < chunks) {
      if (!here.any(!sweep_chunk(c, v, here, chunk))) {
        // All lanes have emptied their frames before the leader says so.
        here.sync();
        if (leads && take_number(&l.done, epoch, chunks) == chunks - 1) note_swept(l, epoch);
        continue;
      }
      atomic::store_relaxed(&failure_mark(v), 1u);
      break;
    }
    // Other warps have the rest.
    if (here.any(limit.passed() || has_failed(v))) {
      atomic::store_relaxed(&failure_mark(v), 1u);
      if (leads) record_error(v, nvme::kTimedOut, nvme::kRead, v.line_begin);
      break;
    }
    help_any(c, v, here, step++);
  }
  // The leader has acquired the sweep for all lanes.
  here.sync();
}

// By the warps of a kernel, before they look for lines: see the head of this file. All lanes of
// `here` call together. If the wait for other warps runs out of time, the volume's error record
// says so.
FW_DEVICE void refresh(line_cache& c, volume& v, lanes here) {
  if (here.any(epoch_of(v) != 0)) base::opaque (&sweep)(c, v, here);
}

}  // namespace fw::cache
