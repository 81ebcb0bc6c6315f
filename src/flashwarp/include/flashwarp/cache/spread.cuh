// Where the lines of a volume lie when it has several namespaces, each behind a controller of its
// own: in stripes over all of them, or whole on every one.
//
// Owns the arithmetic, the choice of a replica, and the count of a replicated write-back. All queue
// pairs of a volume are one table, so whoever helps or quiesces need not know. A warp with slots of
// one ring may wait for slots of another: only of a later one in that table, and it frees the slots
// of each ring as soon as its commands on it are done. So the warps that wait for slots of the last
// ring wait for warps that wait for completions, those of the last but one for these, and so on:
// no circle closes.
#pragma once

#include "flashwarp/cache/set_associative.cuh"

namespace fw::cache {

// Which of a volume's queue pairs a warp uses. Taken once for a command, by one lane for all of
// `mask`, and kept until the command has ended: asked again, the warp may be elsewhere, and its
// ticket would be looked up in another ring.
FW_DEVICE uint32_t take_seat(uint32_t mask) {
  return warp::broadcast(mask, warp::index() + base::spread_index(), base::lowest_bit(mask));
}

// The queue pair of a seat, where the volume has one namespace.
FW_DEVICE nvme::queue_pair& queue_of(const volume& v, uint32_t seat) {
  return v.queues[seat % v.queue_count];
}

// The same on namespace `n` of several.
FW_DEVICE nvme::queue_pair& queue_on(const volume& v, uint32_t seat, uint32_t n) {
  const queue_span span = v.spans[n];
  return v.queues[span.first + seat % span.count];
}

// A line's place in stripes: out of line, since a division is a long piece of code.
struct stripe_place {
  uint32_t on;    // the namespace
  uint64_t line;  // counted from its start
};
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

// The replica that a read of `line` asks, of those not in `tried`; kNamespacesMax when none is
// left. Each line has a favourite, so that the replicas share the reads and each caches its own
// part; replicas that have stopped answering come last.
FW_DEVICE uint32_t choose_replica(const volume& v, uint32_t seat, uint64_t line, uint32_t tried) {
  // Fibonacci hashing: a stride that the count divides must not end on one replica.
  // The high bits count: they are what a product of a multiple of a power of two has.
  const uint64_t hash = (line * 0x9E3779B97F4A7C15ull) >> 32;
  const uint32_t favourite = uint32_t((hash * v.namespace_count) >> 32);
  uint32_t silent = kNamespacesMax;
  for (uint32_t i = 0; i < v.namespace_count; i++) {
    const uint32_t n = (favourite + i) % v.namespace_count;
    if ((tried >> n) & 1) continue;
    if (atomic::load_relaxed(&queue_on(v, seat, n).failed) == 0) return n;
    if (silent == kNamespacesMax) silent = n;
  }
  return silent;
}

// The namespaces that a lane's command goes to, as bits. A read that failed on those of `tried`
// has another replica, or none; a write goes to all.
FW_DEVICE_NOINLINE uint32_t targets_of(const volume& v, uint32_t seat, uint32_t opcode,
                                       uint64_t line, uint32_t tried) {
  if (v.spread == kStriped) return tried != 0 ? 0 : 1u << striped(v, line - v.line_begin).on;
  if (opcode == nvme::kWrite) return tried != 0 ? 0 : (1u << v.namespace_count) - 1;
  const uint32_t n = choose_replica(v, seat, line, tried);
  return n == kNamespacesMax ? 0 : 1u << n;
}

// Of two statuses the one that decides: a command that never came back over one that failed.
FW_HOST_DEVICE uint32_t worse_of(uint32_t a, uint32_t b) {
  if (a == nvme::kTimedOut || b == nvme::kTimedOut) return nvme::kTimedOut;
  return a != nvme::kSuccess ? a : b;
}

// The count of a detached write-back to all replicas: one word a frame, since a line has one
// write-back at a time. Bits 15:0 commands that are not done, 31:16 the status so far.

// The word of a frame, or 0 where a write-back is one command.
FW_DEVICE uint64_t replica_count(const volume& v, uint64_t way) {
  return v.spread == kReplicated ? reinterpret_cast<uint64_t>(&v.replica_writes[way]) : 0;
}

// Before the first command: whoever finishes one has acquired its slot, and this with it.
FW_DEVICE void begin_replicas(volume& v, uint64_t way) {
  if (v.spread == kReplicated) atomic::store_relaxed(&v.replica_writes[way], v.namespace_count);
}

// Counts one command as done. True for the last, which then has the status of all.
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
