// The share table: lines whose newest bytes lie in a thread's own buffer, and who uses them.
//
// A thread that brings a line to a buffer of its own registers it here and is the copy's owner.
// Threads that look for the line later find the owner's buffer, not the cache's older bytes. One
// word an entry says everything and changes by compare-and-swap:
//
//   63:62 state   61 modified   60 of block   59:38 references   37:0 line
//
// state       FREE -> FILLING (one thread decides what the line holds) -> SHARED (the copy is the
//             line) -> CLOSING (its owner wants it back) -> FREE, or SHARED again
// modified    a user that has left stored to the copy
// of block    it lies in the shared memory of one block, and threads of others cannot use it
// references  users beside the owner; the copy lasts until they are gone
//
// A line has one entry: it is claimed under the lock of its bucket, which is held over nothing but
// a look at the table, and only tried. An entry that finds its bucket full lies in a later one;
// each bucket that it passed counts it, so a look ends at the first bucket that nothing has passed.
#pragma once

#include "flashwarp/cache/line_state.cuh"

namespace fw::cache {

// Where a copy is, and who can reach it. Written by its owner while FILLING.
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
  uint32_t* locks;      // one a bucket
  uint32_t* overflows;  // one a bucket: entries that lie behind it for want of room in it
  uint32_t bucket_bits;
  uint32_t reserved;
};
static_assert(sizeof(share_table) == 40);
FW_CHECK_OFFSET(share_table, bucket_bits, 32);

// Entries of a bucket: one 32-byte sector of words.
inline constexpr uint32_t kShareWays = 4;
// Entries of a table, at most: one for each thread that can be on a device.
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

// An entry of the table, and its word as it was seen. kShareNowhere: the line has none.
struct share_place {
  uint32_t entry;
  uint64_t word;
};
inline constexpr uint32_t kShareNowhere = ~0u;

FW_DEVICE uint32_t share_bucket_after(const share_table& t, uint32_t bucket) {
  return (bucket + 1) & ((1u << t.bucket_bits) - 1);
}
// Fibonacci hashing: neighbouring lines, and lines any stride apart, fall far from each other.
FW_DEVICE uint32_t share_bucket_of(const share_table& t, uint64_t line) {
  if (t.bucket_bits == 0) return 0;
  return uint32_t((line * 0x9E3779B97F4A7C15u) >> (64 - t.bucket_bits));
}

// Looks for the entry of `line`. No locks; one sector and one word where nothing has overflowed.
FW_DEVICE share_place share_find(const share_table& t, uint64_t line) {
  uint32_t bucket = share_bucket_of(t, line);
  for (uint32_t n = 0; n < 1u << t.bucket_bits; n++) {
    const uint32_t first = bucket * kShareWays;
    // Acquire, here and of the count below: who finds that a copy is gone has all that its owner
    // wrote back.
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

// Takes back what an entry in `last` counts in the buckets from its line's own on.
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
      // A line of another bucket may be faster, so by compare-and-swap. Acquire: the last owner's
      // use of the entry is over.
      if (atomic::load_relaxed(&t.words[entry]) != share::kFree) continue;
      if (atomic::cas_acq_rel(&t.words[entry], share::kFree, share::kFilling | line)) return entry;
    }
    // Counted before the entry is there: nobody who knows of it stops short of it.
    atomic::add_relaxed(&t.overflows[bucket], 1u);
    bucket = share_bucket_after(t, bucket);
  } while (bucket != home);
  // Full. Each bucket was passed once.
  for (uint32_t b = 0; b < 1u << t.bucket_bits; b++) atomic::add_relaxed(&t.overflows[b], ~0u);
  return kShareNowhere;
}

enum class share_result : uint32_t {
  kJoined,   // the references are counted
  kClaimed,  // the entry is ours, FILLING
  kWait,     // it is being filled or closed, or somebody holds the lock: look again later
  kFull,     // every entry of the table is taken
};
struct share_outcome {
  share_result result;
  uint32_t entry;
};

// Asks for an entry for `line`, which had none. One lane; never waits.
FW_DEVICE_NOINLINE share_outcome share_claim(const share_table t, uint64_t line) {
  uint32_t* lock = &t.locks[share_bucket_of(t, line)];
  if (!atomic::try_lock(lock)) return {share_result::kWait, kShareNowhere};
  share_outcome out = {share_result::kWait, kShareNowhere};
  // Somebody may have come first.
  if (share_find(t, line).entry == kShareNowhere) {
    out.entry = share_take(t, line);
    out.result = out.entry == kShareNowhere ? share_result::kFull : share_result::kClaimed;
  }
  atomic::unlock(lock);
  return out;
}

// Whether a copy takes new users. While its owner wants it back, the patient wait, so that it gets
// it; the others join as long as there are users anyway, so that no thread that holds a line ever
// waits for those who hold another. Without users it is the owner's alone.
FW_HOST_DEVICE bool share_takes(uint64_t word, bool patient) {
  const uint64_t state = share::state_of(word);
  if (state == share::kShared) return true;
  return state == share::kClosing && !patient && share::references(word) != 0 &&
         (word & share::kOfBlock) == 0;
}

// Counts `count` more users of a copy of `line`. False when it takes none, or is none any more.
// Acquire: the buffer's address and its bytes come before.
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

// Lets go of `count` users; `stored` says that one of them stored to the copy. Release: their loads
// and stores come before the owner takes the copy back.
FW_DEVICE void share_drop(const share_table& t, uint32_t entry, uint32_t count, bool stored) {
  update(
      &t.words[entry], [](uint64_t) { return true; },
      [=](uint64_t w) {
        return (w - count * share::kReferenceOne) | (stored ? share::kModified : 0);
      });
}

// Makes the owner's filled buffer the line, with `users` beside the owner. Release: its bytes, and
// where it is.
FW_DEVICE void share_open(const share_table& t, uint32_t entry, uint64_t line, uint32_t users,
                          bool of_block) {
  const uint64_t scope = of_block ? share::kOfBlock : 0;
  atomic::store_release(&t.words[entry],
                        share::kShared | scope | line | users * share::kReferenceOne);
}

// The owner wants the copy back. Returns the word as it is then.
FW_DEVICE uint64_t share_close(const share_table& t, uint32_t entry) {
  update(
      &t.words[entry], [](uint64_t w) { return share::state_of(w) == share::kShared; },
      [](uint64_t w) { return w | share::kClosing; });
  // Acquire: what users that have left did with the copy.
  return atomic::load_acquire(&t.words[entry]);
}

// The owner keeps the copy: it could not be written back, or its users did not leave in time.
FW_DEVICE void share_reopen(const share_table& t, uint32_t entry, bool modified) {
  update(
      &t.words[entry], [](uint64_t w) { return share::state_of(w) == share::kClosing; },
      [=](uint64_t w) {
        return (w & ~share::kStateMask) | share::kShared | (modified ? share::kModified : 0);
      });
}

// Ends the entry of `line`: from here on the cache has it. Release: what we wrote to the cache.
FW_DEVICE void share_end(const share_table& t, uint32_t entry, uint64_t line) {
  atomic::store_release(&t.words[entry], share::kFree);
  // The same for who finds that nothing lies behind a bucket any more.
  atomic::fence();
  share_uncount(t, line, entry / kShareWays);
}

}  // namespace fw::cache
