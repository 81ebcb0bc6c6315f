// Completion by helping: every warp that waits drains the completion queue, for all warps.
//
// The warp that gets the drain lock reads one CQE for each lane in one coalesced load, marks each
// command's slot DONE, moves the head and rings the CQ doorbell once. After it has unlocked, it
// finishes the detached commands among them, through its `Finisher`:
//   finisher.land(queue_pair&, here, members, detached_command, status)   all lanes together;
//                                                                         returns the lane's status
//   finisher.end(detached_command, status)                                each lane by itself
#pragma once

#include "flashwarp/nvme/submission_queue.cuh"

namespace fw::nvme {

// Frees the slot of `ticket` for the next turn. Its buffer must not be touched afterwards.
FW_DEVICE void release_slot(queue_pair& q, uint32_t ticket) {
  // Release: the reads of the slot's buffer come before the next user's writes.
  atomic::store_release(&q.slots[entry_of(q, ticket)],
                        slot::word(next_turn(q, ticket), slot::kFree));
}

// Finishes the detached commands of the lanes in `members`. All lanes land the data of one command
// after the other, then each lane ends its own command.
template <typename Finisher>
FW_DEVICE void finish_detached(queue_pair& q, lanes here, lanes members, uint32_t entry,
                               uint64_t word, Finisher& finisher) {
  if (!members) return;
  const bool mine = members.mine();
  detached_command what = {};
  if (mine) what = atomic::load_plain(&q.detached[entry]);
  // Each lane has acquired its own command; now all lanes land all of them.
  here.sync();
  const uint32_t status = finisher.land(q, here, members, what, slot::status_of(word));
  // All lanes' stores to a frame come before its tag says that it is filled.
  here.sync();
  if (mine) {
    finisher.end(what, status);
    release_slot(q, (uint32_t(word >> 32) << q.depth_log2) | entry);
  }
}

// Whether a ticket was taken whose entry is not published yet. The fence orders the caller's store
// to `fetched` before the look. A submitter whose ticket the caller does not see looks at `fetched`
// behind the same fence, and sees the store.
FW_DEVICE bool has_unpublished(const queue_pair& q, lanes here) {
  atomic::fence_sequential();
  const bool any = atomic::load_relaxed(&q.ticket) != atomic::load_relaxed(&q.tail);
  return here.broadcast(any);
}

// Drains at most one CQE for each lane. Returns how many; 0 if there is none or another warp has
// the lock. All lanes of `here` call together; never waits.
template <typename Finisher>
FW_DEVICE_NOINLINE uint32_t drain(queue_pair& q, lanes here, Finisher& finisher) {
  const bool leads = here.leads();
  // If nothing is in flight, do not look at the ring: that takes a PCIe round trip.
  const bool got = leads && atomic::load_relaxed(&q.head) != atomic::load_relaxed(&q.tail) &&
                   atomic::try_lock(&q.drain_lock);
  if (!here.broadcast(got)) return 0;
  // The leader has acquired what the last drainer did; no lane may see an entry of an older pass.
  here.sync();

  uint32_t head = leads ? atomic::load_relaxed(&q.head) : 0;
  head = here.broadcast(head);
  const uint32_t rank = here.rank();
  // At most `depth` entries: a bundle must not lap the ring.
  const bool in_ring = rank < (1u << q.depth_log2);
  const uint32_t position = head + rank;
  const atomic::word16 raw = atomic::load16_relaxed_system(
      reinterpret_cast<const atomic::word16*>(&q.cq[entry_of(q, position)]));
  // The phase tag of pass 0 is 1, and flips at each pass.
  const uint32_t expected = (turn_of(q, position) & 1) ^ 1;
  const bool ready = in_ring && ((raw.w >> 16) & 1) == expected;
  const lanes gap = here - here.ballot(ready);
  const uint32_t count = gap ? here.below(gap.leader()).count() : here.count();

  uint64_t word = 0;
  uint32_t entry = 0;
  const bool mine = rank < count;
  if (count != 0) {
    // The loads of all lanes come before the leader's doorbell, which lets the controller overwrite
    // the entries. The votes above order no memory.
    here.sync();
    // The controller's data comes before the consumers' reads, which acquire the slot words, and
    // the loads of entries come before the doorbell.
    atomic::fence_system();
    if (mine) {
      entry = raw.w & 0xffff;
      // Acquire: the submitter's detached_command, which this warp may have to read.
      word = slot::done(atomic::load_acquire(&q.slots[entry]), raw.w >> 17);
      atomic::store_release(&q.slots[entry], word);
    }
    const uint32_t last = here.ballot(rank == count - 1).leader();
    const uint32_t sqhd = here.broadcast(raw.z & 0xffff, last);
    if (leads) {
      const uint32_t fetched = atomic::load_relaxed(&q.fetched);
      atomic::store_relaxed(&q.fetched, fetched + entry_of(q, sqhd - fetched));
      atomic::store_relaxed(&q.head, head + count);
      atomic::store_relaxed(&q.helps, atomic::load_plain(&q.helps) + 1);
      ring(q, q.cq_doorbell, entry_of(q, head + count));
    }
  }
  here.sync();
  if (leads) atomic::unlock(&q.drain_lock);
  if (count == 0) return 0;

  const lanes detached = here.ballot(mine && slot::is_detached(word));
  finish_detached(q, here, detached, entry, word, finisher);
  // The controller has fetched entries, so the ring has room, which a publisher may not have seen.
  if (has_unpublished(q, here)) publish(q, here);
  return count;
}

// Does one step of a wait: drains, or else pauses. If the pause has moved commands (on the CPU
// device), drains again, because they are most likely of this queue.
template <typename Finisher>
FW_DEVICE void help(queue_pair& q, lanes here, Finisher& finisher) {
  if (drain(q, here, finisher) == 0 && base::pause(kBackOffNs)) drain(q, here, finisher);
}

// Waits until the slot of each lane's ticket is free. Returns false after the time limit.
template <typename Finisher>
FW_DEVICE bool wait_for_slots(queue_pair& q, lanes here, lanes members, uint32_t ticket,
                              Finisher& finisher) {
  deadline limit(q.data);
  const bool mine = members.mine();
  while (here.any(mine && !slot_is_free(q, ticket))) {
    if (here.any(limit.passed() || atomic::load_relaxed(&q.failed) != 0)) {
      atomic::store_relaxed(&q.failed, 1u);
      return false;
    }
    help(q, here, finisher);
  }
  return true;
}

// Waits until each lane's command is done. Returns the lane's status (0 for lanes that are not
// members). The lanes keep their slots and buffers until release_slot.
template <typename Finisher>
FW_DEVICE uint32_t wait_for_completions(queue_pair& q, lanes here, lanes members, uint32_t ticket,
                                        Finisher& finisher) {
  deadline limit(q.data);
  const bool mine = members.mine();
  uint32_t status = 0;
  bool pending = mine;
  while (true) {
    if (pending) {
      // Acquire: pairs with the drainer's release, which comes after the controller's data.
      const uint64_t word = atomic::load_acquire(&q.slots[entry_of(q, ticket)]);
      if (slot::phase_of(word) == slot::kDone) {
        status = slot::status_of(word);
        pending = false;
      }
    }
    if (!here.any(pending)) return status;
    if (here.any(limit.passed() || atomic::load_relaxed(&q.failed) != 0)) {
      atomic::store_relaxed(&q.failed, 1u);
      return pending ? kTimedOut : status;
    }
    help(q, here, finisher);
  }
}

}  // namespace fw::nvme
