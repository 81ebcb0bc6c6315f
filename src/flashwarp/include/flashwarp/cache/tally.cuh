// What one kernel did, counted in registers and added to the volume's counters once.
#pragma once

#include "flashwarp/cache/set_associative.cuh"

namespace fw::cache {

// Every lane of the warp has the same counts.
struct tally {
  uint32_t hits = 0;
  uint32_t misses = 0;
  uint32_t evictions = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_used = 0;
  uint32_t tier_hits = 0;
  uint32_t tier_lines = 0;

  // Adds what the launch's prefetches did. An access to a prefetched line was counted as a hit, but
  // the launch caused a miss for it: count it as a miss.
  FW_DEVICE void count_ahead(const tally& ahead) {
    hits -= ahead.misses < hits ? ahead.misses : hits;
    add(ahead);
  }

  FW_DEVICE void add(const tally& other) {
    hits += other.hits;
    misses += other.misses;
    evictions += other.evictions;
    bytes_read += other.bytes_read;
    bytes_used += other.bytes_used;
    tier_hits += other.tier_hits;
    tier_lines += other.tier_lines;
  }

  FW_DEVICE void add_to(const volume& v, lanes here) { add_to(shard_of(v), here); }
  FW_DEVICE void add_to(counters& shard, lanes here) {
    if (here.leads()) {
      if (hits != 0) atomic::add_relaxed(&shard.hits, uint64_t(hits));
      if (misses != 0) atomic::add_relaxed(&shard.misses, uint64_t(misses));
      if (evictions != 0) atomic::add_relaxed(&shard.evictions, uint64_t(evictions));
      if (bytes_read != 0) atomic::add_relaxed(&shard.bytes_read, bytes_read);
      if (bytes_used != 0) atomic::add_relaxed(&shard.bytes_used, bytes_used);
      if (tier_hits != 0) atomic::add_relaxed(&shard.tier_hits, uint64_t(tier_hits));
      if (tier_lines != 0) atomic::add_relaxed(&shard.tier_lines, uint64_t(tier_lines));
    }
    *this = tally();
  }

  // Adds what a user's kernel did. Leaves out hits: nearly all hits take no slow path, so the
  // kernel never counts them.
  FW_DEVICE void add_kernel_to(const volume& v, lanes here) { add_kernel_to(shard_of(v), here); }
  FW_DEVICE void add_kernel_to(counters& shard, lanes here) {
    hits = 0;
    if (here.leads()) {
      if (misses != 0) atomic::add_relaxed(&shard.kernel_misses, uint64_t(misses));
      if (bytes_read != 0) atomic::add_relaxed(&shard.kernel_bytes_read, bytes_read);
    }
    add_to(shard, here);
  }
};

}  // namespace fw::cache
