// Failures as sequences that are never reset: kernels append, and the host reads on.
//
// A volume has two sequences, failed commands and indices out of bounds. Each has a ring of entries
// in host-visible memory and a log in device memory. A failure either takes a free entry or is only
// counted. The host stores to one word, the number of entries that it has read, which frees them.
// So the host reads every failure once, now or at its next read, whenever a kernel appends it. The
// entries describe the first failures after each read.
#pragma once

#include "flashwarp/base/atomic.cuh"

namespace fw::cache {

// Entries that wait for the host; a power of two.
inline constexpr uint32_t kFailuresKept = 8;

// What an index out of bounds counts: elements, in a caller's kernel; rows, in a host's call; or
// the ids of a lookup, as the offset of a bag does.
enum index_of : uint32_t { kElements = 0, kRows = 1, kOffsets = 2 };

struct alignas(32) failure {
  uint64_t where;   // the line, counted from the volume's start; or the index
  uint32_t status;  // NVMe status field, or kTimedOut; or an index_of
  uint32_t opcode;
  uint32_t number;  // in the sequence, from 1 on; stored last
  uint32_t reserved;
  uint64_t limit;  // of an index: how many there are, if that is not the array's length; else 0
};
static_assert(sizeof(failure) == 32);

struct alignas(64) error_record {
  failure commands[kFailuresKept];
  failure indices[kFailuresKept];
};
static_assert(sizeof(error_record) == 512);

struct failure_log {
  uint32_t noted;   // entries taken so far
  uint32_t read;    // the host's: entries that it has read
  uint32_t untold;  // failures that found no free entry, and were only counted
  uint32_t reserved;
};
static_assert(sizeof(failure_log) == 16);

// Appends one failure. Any thread; never waits. Until the host has read kFailuresKept entries,
// `untold` is 0: failures are counted there only once all entries are taken.
FW_DEVICE void note_failure(failure_log& log, failure* entries, uint64_t where, uint32_t status,
                            uint32_t opcode, uint64_t limit = 0) {
  uint32_t at;
  do {
    const uint32_t read = atomic::load_relaxed_system(&log.read);
    at = atomic::load_relaxed(&log.noted);
    // If `noted` is older than `read`, the compare-and-swap below fails.
    if (int32_t(at - read) >= int32_t(kFailuresKept)) {
      atomic::add_relaxed(&log.untold, 1u);
      return;
    }
  } while (!atomic::cas_acq_rel(&log.noted, at, at + 1));
  // What the host has read of the entry before we store to it.
  atomic::fence_system();
  failure& entry = entries[at % kFailuresKept];
  atomic::store_plain(&entry.where, where);
  atomic::store_plain(&entry.status, status);
  atomic::store_plain(&entry.opcode, opcode);
  atomic::store_plain(&entry.limit, limit);
  // The entry before its number, by which the host knows it.
  atomic::fence_system();
  atomic::store_relaxed_system(&entry.number, at + 1);
}

}  // namespace fw::cache
