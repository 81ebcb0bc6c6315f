// The misses of one launch, deferred to a few of its blocks.
//
// A warp that waits for storage holds its multiprocessor, and a launch of many warps holds all of
// them. So the warps of a row kernel serve hits and append what misses to this list. A block that
// has no more hits to serve ends; only a few blocks stay, drain the list and wait for the storage.
//
// No block waits for a block that has not begun, nor for one that waits for storage: each block
// decides at its end, by what it sees, whether it stays. The last one to leave finds the list
// empty, in whichever order the blocks run. One launch uses a list at a time, because the entries
// mean nothing without its parameters. A warp of another launch, or one that finds no room, fetches
// its misses itself.
#pragma once

#include "flashwarp/base/block.cuh"
#include "flashwarp/cache/access.cuh"

namespace fw::cache {

// The list's memory begins with this and is zero at first; the host frees it with the volume. The
// words that producers, consumers and leavers change are apart.
struct miss_list {
  alignas(128) uint64_t state;  // who uses it, see `list_state`
  alignas(128) uint64_t head;   // entries that were taken, ever
  alignas(128) uint64_t tail;   // entries that were appended, ever
  alignas(128) uint32_t capacity_log2;
  // Then the ring of entries. The upper half of each is its turn of the ring plus one, the lower
  // half the item. So an entry says whether it has been stored, and is never cleared.
};
static_assert(sizeof(miss_list) == 512);

// A list's state word: bits 0-13 count the users, which are warps that have appended and blocks
// that drain; for a moment also warps of other launches, which find out that they are none. A list
// without users is free. Bits 14-21 count the blocks that drain. Bit 22 says that a block has left
// while entries were there. Bits 23-63 are the launch's number.
namespace list_state {
inline constexpr uint64_t kUser = 1;
inline constexpr uint64_t kUserMask = (1u << 14) - 1;
inline constexpr uint64_t kDrainer = 1u << 14;
inline constexpr uint64_t kDrainerMask = 0xff;
inline constexpr uint64_t kLeftBehind = 1u << 22;
inline constexpr uint32_t kLaunchShift = 23;

FW_DEVICE uint32_t users(uint64_t word) { return uint32_t(word & kUserMask); }
FW_DEVICE uint32_t drainers(uint64_t word) { return uint32_t((word / kDrainer) & kDrainerMask); }
FW_DEVICE uint64_t launch(uint64_t word) { return word >> kLaunchShift; }
}  // namespace list_state

FW_DEVICE uint64_t* entry_at(miss_list& m, uint64_t ticket) {
  const uint64_t place = ticket & ((uint64_t(1) << m.capacity_log2) - 1);
  return reinterpret_cast<uint64_t*>(&m + 1) + place;
}
// The upper half of a ticket's entry.
FW_DEVICE uint32_t turn_of(const miss_list& m, uint64_t ticket) {
  return uint32_t(ticket >> m.capacity_log2) + 1;
}

// The list of a launch, as its parameters have it.
struct list_use {
  miss_list* list;
  uint64_t launch;  // of the array; no launch that may run at the same time has this number
  uint32_t blocks;  // that drain the list; 0: the launch does not defer
  uint32_t bundle;  // items that a warp of these takes at a time
};

// Whether the launch fits into the words of a list, and leaves something to its blocks.
FW_DEVICE bool can_enter(const list_use& use) {
  return block::count() > use.blocks && use.blocks <= list_state::kDrainerMask &&
         warp::count() <= list_state::kUserMask;
}

// Makes the calling warp a user of the list. One lane. Returns false if another launch uses it.
FW_DEVICE bool enter(miss_list& m, uint64_t launch) {
  while (true) {
    const uint64_t seen = atomic::load_relaxed(&m.state);
    if (list_state::users(seen) == 0) {
      const uint64_t word = (launch << list_state::kLaunchShift) + list_state::kUser;
      if (atomic::cas_acq_rel(&m.state, seen, word)) return true;
      continue;
    }
    if (list_state::launch(seen) != launch) return false;
    // All warps of a launch come at once. Of their compare-and-swaps one would succeed in the time
    // that a trip to the word takes; additions succeed at once.
    const uint64_t before = atomic::add_acquire(&m.state, list_state::kUser);
    if (list_state::launch(before) == launch) return true;
    // The list has changed hands meanwhile.
    atomic::add_release(&m.state, ~list_state::kUser + 1);
  }
}

// Appends the items of `members`. All lanes of a warp call it. `entered` says whether the warp is a
// user of the list, which it may become. Returns whether there was room.
FW_DEVICE_NOINLINE bool append(const list_use& use, lanes members, uint64_t item, bool& entered) {
  const lanes here = lanes::all();
  miss_list& m = *use.list;
  // Entries have 32 bits for it.
  if (!can_enter(use) || here.any(item >> 32 != 0)) return false;
  bool inside = entered;
  bool fits = false;
  uint64_t ticket = 0;
  if (warp::lane() == 0) {
    inside = inside || enter(m, use.launch);
    if (inside) {
      // Acquire: the entries below `head`, which ours may overwrite, have been loaded. First
      // `head`, so that it is never above `tail`.
      const uint64_t head = atomic::load_acquire(&m.head);
      const uint64_t tail = atomic::load_relaxed(&m.tail);
      // Between this look and the addition each other warp may make one addition for which it has
      // looked already.
      const uint64_t others = uint64_t(warp::count()) * warp::kWarpWidth;
      if (tail - head + others <= uint64_t(1) << m.capacity_log2) {
        ticket = atomic::add_relaxed(&m.tail, uint64_t(members.count()));
        fits = true;
      }
    }
  }
  entered = here.any(inside);
  fits = here.any(fits);
  ticket = here.broadcast(ticket, 0);
  // The first lane has acquired `head` for all.
  here.sync();
  if (fits && members.mine()) {
    ticket += members.rank();
    // Release, behind the sync: all lanes have stored what a hit that lost its race has copied, and
    // the consumer overwrites it. That entries are there at all, it learns from `tail`, by way of
    // `state`.
    atomic::store_release(entry_at(m, ticket), uint64_t(turn_of(m, ticket)) << 32 | item);
  }
  return fits;
}

// Whether all entries have been taken that the caller knows of. Relaxed: what it has appended or
// acquired is below the `tail` that it loads, in whichever order it loads the two.
FW_DEVICE bool is_empty(const miss_list& m) {
  return atomic::load_relaxed(&m.head) == atomic::load_relaxed(&m.tail);
}

// Takes up to `most` items, one for each of the first lanes. All lanes of a warp call it. Returns
// how many; 0 if the next one has not been stored, or if another warp was faster.
FW_DEVICE uint32_t take(miss_list& m, lanes here, uint32_t most, uint32_t& item) {
  uint64_t head = 0;
  if (warp::lane() == 0) head = atomic::load_relaxed(&m.head);
  head = here.broadcast(head, 0);
  const uint64_t ticket = head + warp::lane();
  // Acquire, for all lanes by the sync below: what the producer has stored of the item's row.
  const uint64_t entry = atomic::load_acquire(entry_at(m, ticket));
  item = uint32_t(entry);
  const bool stored = uint32_t(entry >> 32) == turn_of(m, ticket) && warp::lane() < most;
  const lanes absent = here - here.ballot(stored);
  const uint32_t count = absent ? absent.leader() : warp::kWarpWidth;
  if (count == 0) return 0;
  // All lanes have loaded their entries before the first one gives the places to producers. What it
  // stores to `head` depends on these loads, so it needs no release, which would wait for the rows
  // that the warp has stored, while other warps take and this one's look at `head` gets old.
  here.sync();
  bool ours = false;
  if (warp::lane() == 0) ours = atomic::cas_relaxed(&m.head, head, head + count);
  return here.any(ours) ? count : 0;
}

// What a block does that has served its hits.
enum class at_end : uint32_t { kLeaves, kDrains };

// The limits of `decide`: how many blocks drain, and on how many multiprocessors.
struct drain_limits {
  uint32_t blocks;
  uint32_t multiprocessors;
};

// Decides whether the calling block, which has `users` of the list's users, leaves or drains. One
// thread. A block that drains is one user; `drains` says that it has drained already.
FW_DEVICE at_end decide(miss_list& m, const drain_limits& limits, uint32_t users, bool drains) {
  // Releases what the block has done, before the word is loaded: many blocks come at once, and one
  // changes the word in the time between another's load and its change.
  atomic::fence();
  while (true) {
    const uint64_t seen = atomic::load_relaxed(&m.state);
    const uint64_t left = seen - users * list_state::kUser - (drains ? list_state::kDrainer : 0);
    if (is_empty(m)) {
      // Each block leaves with its own entries taken, or leaves them behind with this mark. The
      // block that clears the mark acquires them, and is inside still: it is the one that they are
      // left to. As long as a mark is set none leaves with an empty list, or entries could come
      // between its look and its leaving.
      if ((seen & list_state::kLeftBehind) != 0) {
        atomic::cas_acq_rel(&m.state, seen, seen & ~list_state::kLeftBehind);
        continue;
      }
      if (atomic::cas_relaxed(&m.state, seen, left)) return at_end::kLeaves;
      continue;
    }
    if (drains) return at_end::kDrains;
    const uint32_t draining = list_state::drainers(seen);
    // Draining blocks share few multiprocessors, so that other kernels lose few: one that lies
    // elsewhere leaves if enough others seem to be left. Only a block that drains is sure to be.
    const bool here = base::spread_index() < limits.multiprocessors;
    const uint32_t others = list_state::users(seen) - draining;
    const uint32_t blocks = draining + others / block::warp_count();
    if (draining != 0 && (draining >= limits.blocks || (!here && blocks > limits.blocks))) {
      const uint64_t behind = left | list_state::kLeftBehind;
      if (atomic::cas_relaxed(&m.state, seen, behind)) return at_end::kLeaves;
      continue;
    }
    const uint64_t joined = left + list_state::kUser + list_state::kDrainer;
    if (atomic::cas_relaxed(&m.state, seen, joined)) return at_end::kDrains;
  }
}

// Whether warps may still append. A block that drains waits for them: they have begun, and do not
// wait for storage unless the list has no room.
FW_DEVICE bool has_producers(const miss_list& m) {
  const uint64_t seen = atomic::load_relaxed(&m.state);
  return list_state::users(seen) > list_state::drainers(seen);
}

// One warp's part in deferring: the argument `misses` of `cache::access`. It costs the loop over
// hits no register: `use` is in the kernel's parameters, and only slow paths look at `entered`.
struct deferral {
  static constexpr bool kDefers = true;
  const list_use& use;
  bool& entered;  // whether the warp is a user of the list
  uint64_t item;  // of the lane

  FW_DEVICE bool allowed() const { return use.blocks != 0; }
  // Defers the items of `members`. Returns whether there was room.
  FW_DEVICE bool defer(lanes members) const { return append(use, members, item, entered); }
};

// The same, of one item for all lanes of the warp: what misses first defers it, once.
struct whole_deferral {
  static constexpr bool kDefers = true;
  const list_use& use;
  bool& entered;
  bool& deferred;  // whether the item is in the list
  uint64_t item;   // kNone: it is not deferred

  static constexpr uint64_t kNone = ~uint64_t(0);

  FW_DEVICE bool allowed() const { return use.blocks != 0 && item != kNone; }
  FW_DEVICE bool defer(lanes members) const {
    if (!deferred) deferred = append(use, members.first(), item, entered);
    return deferred;
  }
};

// The items that a block takes at the end of a launch that may have deferred. All threads of a
// block ask together, until there are none: the block has left then. Blocks that drain lie on the
// first multiprocessors.
class deferred_items {
 public:
  FW_DEVICE deferred_items(const list_use& use, uint32_t multiprocessors)
      : use_(use), limits_{use.blocks, multiprocessors} {}

  // Returns how many items the warp shall serve now, one for each of the first lanes: 0 at the end.
  // `entered` says whether the warp is a user of the list.
  FW_DEVICE uint32_t next(volume& v, bool entered, uint32_t& item) {
    miss_list& m = *use_.list;
    const lanes here = lanes::all();
    if (!drains_) {
      users_ = block::count_of(entered && warp::lane() == 0);
      if (users_ == 0) return 0;
    }
    nvme::deadline limit(v.queues[0].data);
    while (true) {
      if (!takes_) {
        // No warp of the block appends or takes while it decides, or after it has left: the list
        // may be another launch's then. So there is a barrier before the decision, and one behind
        // it.
        bool stays = false;
        if (block::warp_rank() == 0 && warp::lane() == 0) {
          stays = decide(m, limits_, users_, drains_) == at_end::kDrains;
        }
        if (!block::any(stays)) return 0;
        users_ = 1;
        drains_ = takes_ = true;
      }
      const uint32_t count = take(m, here, use_.bundle, item);
      if (count != 0) return count;
      base::pause(nvme::kBackOffNs);
      // After the limit `decide` has the last word.
      const bool more = !is_empty(m) || has_producers(m);
      if (here.any(more && !limit.passed())) continue;
      block::sync();
      takes_ = false;
    }
  }

 private:
  const list_use& use_;
  const drain_limits limits_;
  uint32_t users_ = 0;  // of the list's, that the block is
  bool drains_ = false;
  bool takes_ = false;  // since the block's last decision
};

// Ends a launch that may have deferred. All threads of a block call it. `serve(item, active)`
// serves one item for each active lane; all lanes call it.
template <typename Serve>
FW_DEVICE void end_deferring(const list_use& use, volume& v, uint32_t multiprocessors, bool entered,
                             Serve serve) {
  deferred_items items(use, multiprocessors);
  uint32_t item = 0;
  while (const uint32_t count = items.next(v, entered, item)) serve(item, warp::lane() < count);
}

}  // namespace fw::cache
