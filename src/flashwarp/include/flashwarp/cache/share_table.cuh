// The share table: lines whose newest bytes are in a thread's buffer, and the users of these.
//
// A thread that reads a line into its buffer registers the buffer here as the line's copy, and owns
// the copy. Threads that look for the line later find the copy, not the cache's older bytes. Each
// entry is one word, which changes by compare-and-swap:
//
//   63:62 state   61 modified   60 of block   59:38 references   37:0 line
//
// state       FREE -> FILLING (one thread alone uses the line) -> SHARED (the copy is the line) ->
//             CLOSING (the owner waits until it has no users) -> FREE, or SHARED again
// modified    a user that has left stored to the copy
// of block    the copy is in one block's shared memory, so threads of other blocks cannot use it
// references  users beside the owner; the copy stays until they have left
//
// A line has at most one entry, because a thread claims it under the lock of the line's bucket. The
// lock is only tried, and held for one look at the table. If a bucket is full, the entry goes to a
// later bucket, and each bucket on the way counts it. So a look ends at the first bucket that
// counts none.
#pragma once

#include "flashwarp/cache/line_state.cuh"

namespace fw::cache {

// Where a copy is, and which threads can reach it. Its owner writes this while FILLING.
struct share_copy {
  uint64_t buffer;
  uint32_t scope;  // base::scope_of(buffer)
  uint32_t reserved;
};
static_assert(sizeof(share_copy) == 16);

// Passed by value, as arrays are.
struct share_table {
  uint64_t* words;      // kShareWays << bucket_bits
  share_copy* copies;   // one for each word
  uint32_t* locks;      // one for each bucket
  uint32_t* overflows;  // one for each bucket: entries that passed it because it was full
  uint32_t bucket_bits;
  uint32_t reserved;
};
static_assert(sizeof(share_table) == 40);

// Entries of a bucket: their words fill one 32-byte sector.
inline constexpr uint32_t kShareWays = 4;
// The most entries of a table: one for each thread that can be on a device.
inline constexpr uint32_t kShareEntriesMax = 1u << 20;

namespace share {

inline constexpr uint64_t kReferenceOne = uint64_t(1) << tag::kLineBits;
inline constexpr uint64_t kReferenceMask = uint64_t(0x3FFFFF) << tag::kLineBits;
inline constexpr uint64_t kOfBlock = uint64_t(1) << 60;
inline constexpr uint64_t kModified = uint64_t(1) << 61;
inline constexpr uint64_t kStateMask = uint64_t(3) << 62;
inline constexpr uint64_t kFree = 0;
inline constexpr uint64_t kFilling = uint64_t(1) << 62;
inline constexpr uint64_t kShared = uint64_t(2) << 62;
inline constexpr uint64_t kClosing = uint64_t(3) << 62;
static_assert((tag::kLineMask | kReferenceMask | kOfBlock | kModified | kStateMask) ==
              ~uint64_t(0));

FW_HOST_DEVICE uint64_t line_of(uint64_t word) { return word & tag::kLineMask; }
FW_HOST_DEVICE uint64_t state_of(uint64_t word) { return word & kStateMask; }
FW_HOST_DEVICE uint64_t references(uint64_t word) {
  return (word & kReferenceMask) >> tag::kLineBits;
}
FW_HOST_DEVICE bool is_of(uint64_t word, uint64_t line) {
  return state_of(word) != kFree && line_of(word) == line;
}

}  // namespace share

// An entry of the table, and the word that was seen there. kShareNowhere: the line has none.
struct share_place {
  uint32_t entry;
  uint64_t word;
};
inline constexpr uint32_t kShareNowhere = ~0u;

FW_DEVICE uint32_t share_bucket_after(const share_table& t, uint32_t bucket) {
  return (bucket + 1) & ((1u << t.bucket_bits) - 1);
}
// Fibonacci hashing puts neighbouring lines, and lines at any stride, into buckets far apart.
FW_DEVICE uint32_t share_bucket_of(const share_table& t, uint64_t line) {
  if (t.bucket_bits == 0) return 0;
  return uint32_t((line * 0x9E3779B97F4A7C15u) >> (64 - t.bucket_bits));
}

// Looks for the entry of `line`, without locks. Reads one sector and one word if its bucket has not
// overflowed.
FW_DEVICE share_place share_find(const share_table& t, uint64_t line) {
  uint32_t bucket = share_bucket_of(t, line);
  for (uint32_t n = 0; n < 1u << t.bucket_bits; n++) {
    const uint32_t first = bucket * kShareWays;
    // Acquire, here and of the count below: a thread that finds no copy sees all that the last
    // owner wrote back.
    const atomic::pair64 a = atomic::load_acquire_pair(&t.words[first]);
    const atomic::pair64 b = atomic::load_acquire_pair(&t.words[first + 2]);
    if (share::is_of(a.first, line)) return {first, a.first};
    if (share::is_of(a.second, line)) return {first + 1, a.second};
    if (share::is_of(b.first, line)) return {first + 2, b.first};
    if (share::is_of(b.second, line)) return {first + 3, b.second};
    if (atomic::load_acquire(&t.overflows[bucket]) == 0) break;
    bucket = share_bucket_after(t, bucket);
  }
  return {kShareNowhere, 0};
}

// Subtracts an entry in bucket `last` from the counts of the buckets that it passed.
FW_DEVICE void share_uncount(const share_table& t, uint64_t line, uint32_t last) {
  for (uint32_t b = share_bucket_of(t, line); b != last; b = share_bucket_after(t, b)) {
    atomic::add_relaxed(&t.overflows[b], ~0u);
  }
}

// Takes a free entry for `line`, FILLING, in the first bucket with room. The line's lock is held.
FW_DEVICE uint32_t share_take(const share_table& t, uint64_t line) {
  const uint32_t home = share_bucket_of(t, line);
  uint32_t bucket = home;
  do {
    for (uint32_t way = 0; way < kShareWays; way++) {
      const uint32_t entry = bucket * kShareWays + way;
      // Compare-and-swap, because a line of another bucket may take the entry first. Acquire: the
      // last owner's use of the entry is over.
      if (atomic::load_relaxed(&t.words[entry]) != share::kFree) continue;
      if (atomic::cas_acq_rel(&t.words[entry], share::kFree, share::kFilling | line)) return entry;
    }
    // Count the entry before it is there: a thread that knows of the entry then finds it.
    atomic::add_relaxed(&t.overflows[bucket], 1u);
    bucket = share_bucket_after(t, bucket);
  } while (bucket != home);
  // Full. Each bucket was passed once.
  for (uint32_t b = 0; b < 1u << t.bucket_bits; b++) atomic::add_relaxed(&t.overflows[b], ~0u);
  return kShareNowhere;
}

enum class share_result : uint32_t {
  kJoined,   // the caller is counted as a user
  kClaimed,  // the entry is the caller's, FILLING
  kWait,     // the copy is being filled or closed, or the lock is held: try again later
  kFull,     // every entry of the table is taken
};
struct share_outcome {
  share_result result;
  uint32_t entry;
};

// Claims an entry for `line`, for which none was found. One lane; never waits.
FW_DEVICE_NOINLINE share_outcome share_claim(const share_table t, uint64_t line) {
  uint32_t* lock = &t.locks[share_bucket_of(t, line)];
  if (!atomic::try_lock(lock)) return {share_result::kWait, kShareNowhere};
  share_outcome out = {share_result::kWait, kShareNowhere};
  // Look again: another thread may have claimed one since.
  if (share_find(t, line).entry == kShareNowhere) {
    out.entry = share_take(t, line);
    out.result = out.entry == kShareNowhere ? share_result::kFull : share_result::kClaimed;
  }
  atomic::unlock(lock);
  return out;
}

// Whether a copy accepts a new user. A SHARED copy does. A CLOSING copy rejects patient callers, so
// that its users become fewer and its owner gets it back. It accepts impatient callers while it has
// users, because a caller that waited for these users, and they for a line that the caller holds,
// would never end. Without users a CLOSING copy belongs to its owner.
FW_HOST_DEVICE bool share_takes(uint64_t word, bool patient) {
  const uint64_t state = share::state_of(word);
  if (state == share::kShared) return true;
  return state == share::kClosing && !patient && share::references(word) != 0 &&
         (word & share::kOfBlock) == 0;
}

// Adds `count` users to a copy of `line`. Returns false if the copy accepts none or has ended.
// Acquire: the buffer's address and bytes were stored before.
FW_DEVICE bool share_join(const share_table& t, uint32_t entry, uint64_t line, uint32_t count,
                          bool patient) {
  return update(
             &t.words[entry],
             [=](uint64_t w) {
               return share_takes(w, patient) && share::line_of(w) == line &&
                      share::references(w) + count <= share::references(share::kReferenceMask);
             },
             [=](uint64_t w) { return w + count * share::kReferenceOne; }) != 0;
}

// Removes `count` users; `stored` says that one of them stored to the copy. Release: their loads
// and stores come before the owner's next use.
FW_DEVICE void share_drop(const share_table& t, uint32_t entry, uint32_t count, bool stored) {
  update(
      &t.words[entry], [](uint64_t) { return true; },
      [=](uint64_t w) {
        return (w - count * share::kReferenceOne) | (stored ? share::kModified : 0);
      });
}

// Makes the owner's filled buffer the copy, with `users` beside the owner. Release: its bytes and
// its address.
FW_DEVICE void share_open(const share_table& t, uint32_t entry, uint64_t line, uint32_t users,
                          bool of_block) {
  const uint64_t scope = of_block ? share::kOfBlock : 0;
  atomic::store_release(&t.words[entry],
                        share::kShared | scope | line | users * share::kReferenceOne);
}

// Closes the copy for its owner, who may take it back once it has no users. Returns its word.
FW_DEVICE uint64_t share_close(const share_table& t, uint32_t entry) {
  update(
      &t.words[entry], [](uint64_t w) { return share::state_of(w) == share::kShared; },
      [](uint64_t w) { return w | share::kClosing; });
  // Acquire: the stores of users that have left.
  return atomic::load_acquire(&t.words[entry]);
}

// Opens a closing copy again: it could not be written back, or its users did not leave in time.
FW_DEVICE void share_reopen(const share_table& t, uint32_t entry, bool modified) {
  update(
      &t.words[entry], [](uint64_t w) { return share::state_of(w) == share::kClosing; },
      [=](uint64_t w) {
        return (w & ~share::kStateMask) | share::kShared | (modified ? share::kModified : 0);
      });
}

// Ends the entry of `line`: from now on the line is in the cache. Release: what was written there.
FW_DEVICE void share_end(const share_table& t, uint32_t entry, uint64_t line) {
  atomic::store_release(&t.words[entry], share::kFree);
  // The same for threads that find a bucket's count at 0 and so look no further.
  atomic::fence();
  share_uncount(t, line, entry / kShareWays);
}

}  // namespace fw::cache
