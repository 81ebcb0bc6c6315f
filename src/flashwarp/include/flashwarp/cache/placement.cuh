// Where a volume's lines lie, and by which queue pair a warp reaches them.
//
// A volume has one namespace, or several of which each has a controller of its own: the lines are
// then striped over all namespaces or replicated on every one. All queue pairs of a volume are in
// one table, so code that helps or quiesces needs no knowledge of the namespaces.
#pragma once

#include "flashwarp/cache/set_associative.cuh"

namespace fw::cache {

// A number that chooses the warp's queue pairs. One lane asks for all of `here`, once for each
// command, and keeps the number until the command has ended: the warp may run on another
// multiprocessor later, and a new number would look its ticket up in another ring.
FW_DEVICE uint32_t take_seat(lanes here) {
  return here.broadcast(warp::index() + base::spread_index());
}

// The queue pair of a seat on a volume of one namespace.
FW_DEVICE nvme::queue_pair& queue_of(const volume& v, uint32_t seat) {
  return v.queues[seat % v.queue_count];
}

// The queue pair of a seat on namespace `n` of several.
FW_DEVICE nvme::queue_pair& queue_on(const volume& v, uint32_t seat, uint32_t n) {
  const queue_span span = v.spans[n];
  return v.queues[span.first + seat % span.count];
}

struct stripe_place {
  uint32_t on;    // the namespace
  uint64_t line;  // counted from its start
};
// Not inlined: the code of a division is long.
FW_DEVICE_NOINLINE stripe_place striped(const volume& v, uint64_t index) {
  const uint64_t stripe = index / v.stripe_lines;
  const uint64_t row = stripe / v.namespace_count;
  return {uint32_t(stripe - row * v.namespace_count),
          row * v.stripe_lines + (index - stripe * v.stripe_lines)};
}

// The number of a global line in the namespace that holds it.
FW_DEVICE uint64_t line_in_namespace(const volume& v, uint64_t line) {
  const uint64_t index = line - v.line_begin;
  return v.spread == kStriped ? striped(v, index).line : index;
}

// The worse of two statuses. A command that never came back is worse than one that failed.
FW_HOST_DEVICE uint32_t worse_of(uint32_t a, uint32_t b) {
  if (a == nvme::kTimedOut || b == nvme::kTimedOut) return nvme::kTimedOut;
  return a != nvme::kSuccess ? a : b;
}

// Counts the commands of a detached write-back to all replicas. One word for each frame is enough,
// because a line has one write-back at a time. Bits 15:0 count the commands that are not done,
// bits 31:16 hold the worst status so far.

// The address of a frame's word; 0 if a write-back is one command.
FW_DEVICE uint64_t replica_count(const volume& v, uint64_t way) {
  return v.spread == kReplicated ? reinterpret_cast<uint64_t>(&v.replica_writes[way]) : 0;
}

// Sets the count, before the first command. The release of a command's slot passes it to the warp
// that finishes the command.
FW_DEVICE void begin_replicas(volume& v, uint64_t way) {
  if (v.spread == kReplicated) atomic::store_relaxed(&v.replica_writes[way], v.namespace_count);
}

// Counts one command as done. Returns true for the last one, and sets `status` to the worst of all.
FW_DEVICE bool finish_replica(uint32_t* word, uint32_t& status) {
  while (true) {
    const uint32_t seen = atomic::load_relaxed(word);
    const uint32_t all = worse_of(seen >> 16, status);
    const uint32_t left = (seen & 0xffff) - 1;
    if (!atomic::cas_acq_rel(word, seen, all << 16 | left)) continue;
    status = all;
    return left == 0;
  }
}

}  // namespace fw::cache
