// Submission: tickets, entries and the tail doorbell.
//
// A warp takes consecutive tickets with one atomic, and each lane writes its own entry. Then the
// warp that gets the publish lock moves the tail past all consecutive written entries and rings the
// doorbell once for all of them. Writing and ringing are separate, so batches form by themselves.
#pragma once

#include "flashwarp/nvme/queue_pair.cuh"

namespace fw::nvme {

// Gives each lane of `members` (a subset of `mask`) a ticket, consecutive in lane order. `members`
// has at most `depth` lanes, so no two tickets of a batch share a slot.
FW_DEVICE uint32_t take_tickets(queue_pair& q, uint32_t mask, uint32_t members) {
  FW_ASSERT(base::popcount(members) <= (1u << q.depth_log2));
  const uint32_t leader = base::lowest_bit(mask);
  uint32_t first = 0;
  if (warp::lane() == leader) first = atomic::add_relaxed(&q.ticket, base::popcount(members));
  return warp::broadcast(mask, first, leader) + warp::rank_in(members);
}

// Whether the slot of `ticket` is free for it.
FW_DEVICE bool slot_is_free(const queue_pair& q, uint32_t ticket) {
  // Acquire: the last user's reads of the slot's buffer and entry are over.
  return atomic::load_acquire(&q.slots[entry_of(q, ticket)]) ==
         slot::word(turn_of(q, ticket), slot::kFree);
}

// Writes one entry of the ring and marks its slot WRITTEN. The slot must be free for `ticket`.
FW_DEVICE void write_entry(queue_pair& q, uint32_t ticket, command entry, uint64_t flags) {
  const uint32_t e = entry_of(q, ticket);
  if (q.drive != nullptr) address_for_drive(entry, *q.drive);
  // Four 16-byte stores from registers, so that the entry is never in local memory.
  atomic::word16* to = reinterpret_cast<atomic::word16*>(&q.sq[e]);
  using word = atomic::raw<16>;
  word::store_plain(&to[0], {entry.opcode_cid, entry.nsid, entry.cdw2, entry.cdw3});
  word::store_plain(&to[1], {uint32_t(entry.mptr), uint32_t(entry.mptr >> 32), uint32_t(entry.prp1),
                             uint32_t(entry.prp1 >> 32)});
  word::store_plain(&to[2],
                    {uint32_t(entry.prp2), uint32_t(entry.prp2 >> 32), entry.cdw10, entry.cdw11});
  word::store_plain(&to[3], {entry.cdw12, entry.cdw13, entry.cdw14, entry.cdw15});
  // Release: a publisher that sees WRITTEN sees the entry, and a write's data.
  atomic::store_release(&q.slots[e], slot::word(turn_of(q, ticket), slot::kWritten) | flags);
}

// Whether the entry of `ticket` is written and not done.
FW_DEVICE bool is_written(const queue_pair& q, uint32_t ticket) {
  const uint64_t word = atomic::load_acquire(&q.slots[entry_of(q, ticket)]);
  return (word & ~slot::kDetached) == slot::word(turn_of(q, ticket), slot::kWritten);
}

// Counts the consecutive written entries from `tail` on, at most as many as the ring has room for.
// It holds depth - 1 unfetched entries, because a full ring must not look empty (tail == head).
FW_DEVICE uint32_t count_publishable(const queue_pair& q, uint32_t mask, uint32_t tail) {
  const uint32_t depth = 1u << q.depth_log2;
  // One lane loads for all: the lanes must leave the loop together.
  const uint32_t fetched =
      warp::broadcast(mask, atomic::load_relaxed(&q.fetched), base::lowest_bit(mask));
  const uint32_t space = depth - 1 - (tail - fetched);
  const uint32_t lanes = base::popcount(mask);
  uint32_t count = 0;
  while (count < space) {
    const uint32_t mine = count + warp::rank_in(mask);
    const bool ready = mine < space && is_written(q, tail + mine);
    const uint32_t gap = mask & ~warp::ballot(mask, ready);
    if (gap != 0) return count + base::popcount(mask & ((1u << base::lowest_bit(gap)) - 1));
    count += lanes;
  }
  return space;
}

// Publishes written entries. Never waits; all lanes of `mask` call together. When it returns, each
// entry that was written before the call is published, or waits for an earlier ticket, whose owner
// will publish it, or for room in the ring, and then a drainer will.
FW_DEVICE_NOINLINE void publish(queue_pair& q, uint32_t mask) {
  const uint32_t leader = base::lowest_bit(mask);
  const bool leads = warp::lane() == leader;
  // Orders the store of WRITTEN before the look at the lock. The holder unlocks and looks at the
  // entries again, with the same fence in between, so one of the two sees the other.
  atomic::fence_sequential();
  while (true) {
    bool got = leads && atomic::try_lock(&q.publish_lock);
    if (!warp::broadcast(mask, got, leader)) return;
    uint32_t tail = leads ? atomic::load_relaxed(&q.tail) : 0;
    tail = warp::broadcast(mask, tail, leader);
    const uint32_t count = count_publishable(q, mask, tail);
    // Each lane has acquired the entries that it counted; the leader publishes all of them.
    warp::sync(mask);
    if (leads) {
      if (count != 0) {
        atomic::store_relaxed(&q.tail, tail + count);
        atomic::store_relaxed(&q.doorbells, atomic::load_plain(&q.doorbells) + 1);
        // All entries, of this warp and of other submitters, come before the doorbell: the
        // controller reads them as soon as it sees the tail move.
        atomic::fence_system();
        ring(q, q.sq_doorbell, entry_of(q, tail + count));
      }
      atomic::unlock(&q.publish_lock);
    }
    warp::sync(mask);
    atomic::fence_sequential();
    if (count_publishable(q, mask, tail + count) == 0) return;
  }
}

}  // namespace fw::nvme
