// Submission: tickets, entries and the tail doorbell.
//
// A warp takes consecutive tickets with one atomic, and each lane writes its own entry. Then the
// warp that gets the publish lock moves the tail past all consecutive written entries and rings the
// doorbell once for all of them. Writing and ringing are separate, so bundles form by themselves.
#pragma once

#include "flashwarp/nvme/queue_pair.cuh"

namespace fw::nvme {

// Gives each lane of `members` (a subset of `here`) a ticket, consecutive in lane order. `members`
// has at most `depth` lanes, so no two tickets of a bundle share a slot.
FW_DEVICE uint32_t take_tickets(queue_pair& q, lanes here, lanes members) {
  FW_ASSERT(members.count() <= (1u << q.depth_log2));
  uint32_t first = 0;
  if (here.leads()) first = atomic::add_relaxed(&q.ticket, members.count());
  return here.broadcast(first) + members.rank();
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
FW_DEVICE uint32_t count_publishable(const queue_pair& q, lanes here, uint32_t tail) {
  const uint32_t depth = 1u << q.depth_log2;
  // One lane loads for all: the lanes must leave the loop together.
  const uint32_t fetched = here.broadcast(atomic::load_relaxed(&q.fetched));
  const uint32_t space = depth - 1 - (tail - fetched);
  uint32_t count = 0;
  while (count < space) {
    const uint32_t mine = count + here.rank();
    const bool ready = mine < space && is_written(q, tail + mine);
    const lanes gap = here - here.ballot(ready);
    if (gap) return count + here.below(gap.leader()).count();
    count += here.count();
  }
  return space;
}

// Publishes written entries. Never waits; all lanes of `here` call together. When it returns, each
// entry that was written before the call is published, or waits for an earlier ticket, whose owner
// will publish it, or for room in the ring, and then a drainer will.
FW_DEVICE_NOINLINE void publish(queue_pair& q, lanes here) {
  const bool leads = here.leads();
  // Orders the store of WRITTEN before the look at the lock. The holder unlocks and looks at the
  // entries again, with the same fence in between, so one of the two sees the other.
  atomic::fence_sequential();
  while (true) {
    bool got = leads && atomic::try_lock(&q.publish_lock);
    if (!here.broadcast(got)) return;
    uint32_t tail = leads ? atomic::load_relaxed(&q.tail) : 0;
    tail = here.broadcast(tail);
    const uint32_t count = count_publishable(q, here, tail);
    // Each lane has acquired the entries that it counted; the leader publishes all of them.
    here.sync();
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
    here.sync();
    atomic::fence_sequential();
    if (count_publishable(q, here, tail + count) == 0) return;
  }
}

}  // namespace fw::nvme
