// Submitting: tickets, entries and the tail doorbell.
//
// A warp takes consecutive tickets with one atomic; each lane writes its own entry; then whoever
// gets the publish lock moves the tail past every consecutive written entry and rings once for all
// of them. Posting an entry and ringing are separate steps, so batches form by themselves.
#pragma once

#include "flashwarp/nvme/queue_pair.cuh"

namespace fw::nvme {

// Gives each lane of `members` (a subset of `mask`) its own ticket, consecutive in lane order.
// At most `depth` lanes may ask at once: two tickets of one batch must not share a slot.
FW_DEVICE uint32_t take_tickets(queue_pair& q, uint32_t mask, uint32_t members) {
  FW_ASSERT(base::popcount(members) <= (1u << q.depth_log2));
  const uint32_t leader = base::lowest_bit(mask);
  uint32_t first = 0;
  if (warp::lane() == leader) first = atomic::add_relaxed(&q.ticket, base::popcount(members));
  return warp::broadcast(mask, first, leader) + warp::rank_in(members);
}

// Whether the slot of `ticket` is free for it.
FW_DEVICE bool slot_is_free(const queue_pair& q, uint32_t ticket) {
  // Acquire: the previous user's reads of the slot's buffer and entry are over.
  return atomic::load_acquire(&q.slots[entry_of(q, ticket)]) ==
         slot::word(turn_of(q, ticket), slot::kFree);
}

// Writes one entry of the ring and marks its slot written. The slot must be free for `ticket`.
FW_DEVICE void write_entry(queue_pair& q, uint32_t ticket, const command& entry, uint64_t flags) {
  const uint32_t e = entry_of(q, ticket);
  // Four 16-byte stores; built from registers, so that the entry never lies in local memory.
  atomic::word16* to = reinterpret_cast<atomic::word16*>(&q.sq[e]);
  using word = atomic::raw<16>;
  word::store_plain(&to[0], {entry.opcode_cid, entry.nsid, entry.cdw2, entry.cdw3});
  word::store_plain(&to[1], {uint32_t(entry.mptr), uint32_t(entry.mptr >> 32), uint32_t(entry.prp1),
                             uint32_t(entry.prp1 >> 32)});
  word::store_plain(&to[2],
                    {uint32_t(entry.prp2), uint32_t(entry.prp2 >> 32), entry.cdw10, entry.cdw11});
  word::store_plain(&to[3], {entry.cdw12, entry.cdw13, entry.cdw14, entry.cdw15});
  // Release: the publisher must see the entry (and a write's data) once it sees WRITTEN.
  atomic::store_release(&q.slots[e], slot::word(turn_of(q, ticket), slot::kWritten) | flags);
}

// True while the entry of `ticket` waits to be published.
FW_DEVICE bool is_written(const queue_pair& q, uint32_t ticket) {
  const uint64_t word = atomic::load_acquire(&q.slots[entry_of(q, ticket)]);
  return (word & ~slot::kDetached) == slot::word(turn_of(q, ticket), slot::kWritten);
}

// Counts the consecutive written entries from `tail` on, bounded by the free space of the ring:
// depth - 1 unfetched entries, because a full ring must not look empty (tail == head).
FW_DEVICE uint32_t count_publishable(const queue_pair& q, uint32_t mask, uint32_t tail) {
  const uint32_t depth = 1u << q.depth_log2;
  // One lane's view for all of them: the lanes must agree on when to stop.
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

// Publishes what can be published. Never waits; called by all lanes of `mask` together. When it
// returns, each entry that was written before the call is published, or waits for an earlier ticket
// or for ring space, whose owner or drainer will publish it.
FW_DEVICE_NOINLINE void publish(queue_pair& q, uint32_t mask) {
  const uint32_t leader = base::lowest_bit(mask);
  const bool leads = warp::lane() == leader;
  // Store-load order between marking an entry WRITTEN and finding the lock taken: the holder looks
  // again after it unlocks, behind the same fence, so one of the two sees the other.
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
        // The entries, ours and those acquired from other submitters, before the doorbell: the
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
