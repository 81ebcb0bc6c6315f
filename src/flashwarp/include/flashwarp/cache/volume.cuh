// The structures of a cache in device memory: the cache, its volumes, and what they count.
//
// A volume is one open array. Line numbers are global to the cache, and each volume owns a range of
// them.
#pragma once

#include "flashwarp/base/assert.cuh"
#include "flashwarp/cache/error_record.cuh"
#include "flashwarp/cache/geometry.cuh"
#include "flashwarp/cache/host_tier.cuh"
#include "flashwarp/cache/owner_requests.cuh"
#include "flashwarp/nvme/completion_queue.cuh"

namespace fw::cache {

// Events of one volume, in device memory. There are several shards, so that warps seldom share a
// word.
struct alignas(64) counters {
  uint64_t hits;
  uint64_t misses;
  uint64_t evictions;
  uint64_t write_backs;
  uint64_t bytes_read;     // from the storage
  uint64_t bytes_written;  // to the storage
  uint64_t bytes_used;     // by the callers
  uint64_t errors;
  uint64_t tier_hits;   // misses that the host tier answered
  uint64_t tier_lines;  // lines that went to the host tier
  // The misses and bytes read, among those above, of users' kernels. Loads that hit count nothing,
  // so there are no hits or bytes used that these could be compared with.
  uint64_t kernel_misses;
  uint64_t kernel_bytes_read;
  uint64_t bypasses;  // misses that were copied around the cache
  uint64_t reserved[3];
};
static_assert(sizeof(counters) == 128);
inline constexpr uint32_t kCounterShards = 64;

// How the lines of a volume lie on its namespaces.
enum spread : uint32_t {
  kOneNamespace = 0,
  kStriped = 1,     // stripe k is stripe k / n of namespace k mod n
  kReplicated = 2,  // every namespace holds all lines
};

inline constexpr uint32_t kNamespacesMax = 16;

// The queue pairs of one namespace, in its volume's table.
struct queue_span {
  uint32_t first;
  uint32_t count;
};

// What a file's lease has come to, in device memory; see lease.cuh. The entries of one array share
// it.
struct alignas(64) lease {
  uint32_t epoch;  // stored by the host: how often other programs may have changed the file
  uint32_t reserved;
  uint32_t swept;  // the last epoch whose sweep has ended
  uint32_t reserved2;
  // The epoch (upper half), and how many chunks of frames warps have taken, or swept, for it.
  uint64_t next;
  uint64_t done;
};
static_assert(sizeof(lease) == 64);

// One open array: its namespaces, the queue pairs that reach them, and its range of line numbers.
struct alignas(64) volume {
  uint64_t line_begin;  // first global line number
  uint64_t line_count;  // 0: the entry is free
  uint64_t bytes;       // of the namespace, or of all stripes together
  nvme::queue_pair* queues;
  counters* events;      // kCounterShards entries
  error_record* errors;  // host-visible
  uint32_t queue_count;  // of all namespaces
  uint32_t spread;
  cache::lease* lease;  // null: none of the namespaces was opened under one
  // Used seldom: after errors, and by volumes of several namespaces.
  uint64_t stripe_lines;
  uint32_t* replica_writes;  // kReplicated: one word for each frame, see finish_replica
  uint32_t namespace_count;
  uint32_t failed;    // kReplicated: see failure_mark
  uint32_t path;      // nvme::route, when the array was attached
  uint32_t attached;  // 0: gone, or not there yet; see visits.cuh
  queue_span spans[kNamespacesMax];
  failure_log commands;  // the state of the two sequences in `errors`
  failure_log indices;
  // Warps of other arrays that use the queues. Survives attach and detach, because a warp that
  // comes after a detach still counts itself before it leaves.
  alignas(64) uint32_t visitors;
};
static_assert(sizeof(volume) == 320);

inline constexpr uint32_t kVolumesMax = 64;

struct alignas(64) line_cache {
  cache::geometry geometry;
  uint32_t* set_control;  // set_count: lock in bit 31, the policy's hand below
  volume* volumes;        // kVolumesMax
  uint32_t page_bytes;    // CC.MPS of the controllers, for PRP entries
  uint32_t tier_ways;     // of each subset of the host tier; 0: there is none
  host_tier tier;
  uint32_t refusals;    // how often a policy chose a way that was no candidate
  uint32_t volume_end;  // entries of `volumes` from here on are free
  // Not null: tags and frames are another process's, and kernels here can only read them.
  owner_requests* owner;
};
static_assert(sizeof(line_cache) == 128);

inline constexpr uint32_t kSetLocked = 1u << 31;

// Bytes of the namespace that `line` covers. All lines but the last are whole.
FW_HOST_DEVICE uint64_t bytes_of_line(const line_cache& c, const volume& v, uint64_t line) {
  const uint64_t begin = (line - v.line_begin) << c.geometry.line_shift;
  const uint64_t rest = v.bytes - begin;
  return rest < line_bytes(c.geometry) ? rest : line_bytes(c.geometry);
}

// The volume that owns a global line number.
FW_DEVICE volume& volume_of(const line_cache& c, uint64_t line) {
  for (uint32_t i = 0; i < kVolumesMax; i++) {
    // Acquire: an array that is being attached stores `line_begin` before `line_count`.
    const uint64_t count = atomic::load_acquire(&c.volumes[i].line_count);
    if (line - c.volumes[i].line_begin < count) return c.volumes[i];
  }
  FW_ASSERT(false);
  return c.volumes[0];
}

// Set once a wait for a line of the volume ran out of time, so that later waits end at once.
// Replicated volumes have a word of their own, because other replicas can still answer when a queue
// pair has failed.
FW_DEVICE uint32_t& failure_mark(volume& v) {
  return v.spread == kReplicated ? v.failed : v.queues[0].failed;
}

FW_DEVICE counters& shard_of(const volume& v) {
  return v.events[(base::spread_index() + warp::index()) % kCounterShards];
}

// Records a failed command, for the host to raise.
FW_DEVICE_NOINLINE void record_error(volume& v, uint32_t status, uint32_t opcode, uint64_t line) {
  atomic::add_relaxed(&shard_of(v).errors, uint64_t(1));
  note_failure(v.commands, v.errors->commands, line - v.line_begin, status, opcode);
}

}  // namespace fw::cache
