// Completing by helping: whoever waits drains the completion queue for everybody.
//
// The winner of the drain lock reads one CQE a lane in one coalesced load, marks each command's
// slot done, moves the head and rings the CQ doorbell once. Commands that nobody waits for are
// finished by the drainer after it has let go of the lock, through the `Finisher` it was given:
//   finisher.land(queue_pair&, mask, members, detached_command, status)   all lanes, together;
//                                                                         returns a lane's status
//   finisher.end(detached_command, status)                                each lane its own
#pragma once

#include "flashwarp/nvme/submission_queue.cuh"

namespace fw::nvme {

// Frees the slot of `ticket` for the next turn. Its buffer must not be touched afterwards.
FW_DEVICE void release_slot(queue_pair& q, uint32_t ticket) {
  // Release: our reads of the slot's buffer stay before the next user's writes.
  atomic::store_release(&q.slots[entry_of(q, ticket)],
                        slot::word(next_turn(q, ticket), slot::kFree));
}

// Finishes the detached commands whose lanes are in `members`: all lanes land what they have read,
// one command after the other, with nothing to wait for in between; then each lane ends its own.
template <typename Finisher>
FW_DEVICE void finish_detached(queue_pair& q, uint32_t mask, uint32_t members, uint32_t entry,
                               uint64_t word, Finisher& finisher) {
  if (members == 0) return;
  const bool mine = (members >> warp::lane()) & 1;
  detached_command what = {};
  if (mine) what = atomic::load_plain(&q.detached[entry]);
  // Each lane has acquired its own command; now all lanes land all of them.
  warp::sync(mask);
  const uint32_t status = finisher.land(q, mask, members, what, slot::status_of(word));
  // All lanes' stores to a frame before its tag says that it is filled.
  warp::sync(mask);
  if (mine) {
    finisher.end(what, status);
    release_slot(q, (uint32_t(word >> 32) << q.depth_log2) | entry);
  }
}

// Whether a ticket has been taken whose entry is not published yet. Store-load order between what
// the caller has stored to `fetched` and the look: whoever takes a ticket that we do not see looks
// at `fetched` behind the same fence, and finds what we stored.
FW_DEVICE bool has_unpublished(const queue_pair& q, uint32_t mask) {
  atomic::fence_sequential();
  const bool any = atomic::load_relaxed(&q.ticket) != atomic::load_relaxed(&q.tail);
  return warp::broadcast(mask, any, base::lowest_bit(mask));
}

// Drains up to one CQE a lane. Returns how many were drained; 0 when none waits or another warp
// has the lock. Called by all lanes of `mask` together; never waits.
template <typename Finisher>
FW_DEVICE_NOINLINE uint32_t drain(queue_pair& q, uint32_t mask, Finisher& finisher) {
  const uint32_t leader = base::lowest_bit(mask);
  const bool leads = warp::lane() == leader;
  // With nothing on its way there is nothing to see, and the ring is a PCIe round trip away.
  const bool got = leads && atomic::load_relaxed(&q.head) != atomic::load_relaxed(&q.tail) &&
                   atomic::try_lock(&q.drain_lock);
  if (!warp::broadcast(mask, got, leader)) return 0;
  // The leader has acquired what the last drainer did; no lane may see an entry of an older pass.
  warp::sync(mask);

  uint32_t head = leads ? atomic::load_relaxed(&q.head) : 0;
  head = warp::broadcast(mask, head, leader);
  const uint32_t rank = warp::rank_in(mask);
  // A batch never laps the ring: the CQ has `depth` entries.
  const bool in_ring = rank < (1u << q.depth_log2);
  const uint32_t position = head + rank;
  const atomic::word16 raw = atomic::load16_relaxed_system(
      reinterpret_cast<const atomic::word16*>(&q.cq[entry_of(q, position)]));
  // The phase tag of pass 0 is 1, and flips at each pass.
  const uint32_t expected = (turn_of(q, position) & 1) ^ 1;
  const bool ready = in_ring && ((raw.w >> 16) & 1) == expected;
  const uint32_t gap = mask & ~warp::ballot(mask, ready);
  const uint32_t count =
      gap == 0 ? base::popcount(mask) : base::popcount(mask & ((1u << base::lowest_bit(gap)) - 1));

  uint64_t word = 0;
  uint32_t entry = 0;
  const bool mine = rank < count;
  if (count != 0) {
    // Each lane has loaded an entry that the leader's doorbell gives back: the votes above order no
    // memory, so without this a load could still be on its way when the controller overwrites it.
    warp::sync(mask);
    // The controller's data before our consumers' reads of it: they acquire from the slot word. And
    // all lanes' loads of entries before the doorbell.
    atomic::fence_system();
    if (mine) {
      entry = raw.w & 0xffff;
      // Acquire: the submitter's detached_command, should we be the one who finishes it.
      word = slot::done(atomic::load_acquire(&q.slots[entry]), raw.w >> 17);
      atomic::store_release(&q.slots[entry], word);
    }
    const uint32_t last = base::lowest_bit(warp::ballot(mask, rank == count - 1));
    const uint32_t sqhd = warp::broadcast(mask, raw.z & 0xffff, last);
    if (leads) {
      const uint32_t fetched = atomic::load_relaxed(&q.fetched);
      atomic::store_relaxed(&q.fetched, fetched + entry_of(q, sqhd - fetched));
      atomic::store_relaxed(&q.head, head + count);
      atomic::store_relaxed(&q.helps, atomic::load_plain(&q.helps) + 1);
      ring(q, q.cq_doorbell, entry_of(q, head + count));
    }
  }
  warp::sync(mask);
  if (leads) atomic::unlock(&q.drain_lock);
  if (count == 0) return 0;

  const uint32_t detached = warp::ballot(mask, mine && slot::is_detached(word));
  finish_detached(q, mask, detached, entry, word, finisher);
  // The controller has fetched more entries, so the ring has room that a publisher may have missed.
  if (has_unpublished(q, mask)) publish(q, mask);
  return count;
}

// One step of any wait: drain, publish, or else back off. Where that has moved commands, they are
// most likely this queue's.
template <typename Finisher>
FW_DEVICE void help(queue_pair& q, uint32_t mask, Finisher& finisher) {
  if (drain(q, mask, finisher) == 0 && base::pause(kBackOffNs)) drain(q, mask, finisher);
}

// Waits until each lane of `members` can use the slot of its ticket. False when time ran out.
template <typename Finisher>
FW_DEVICE bool wait_for_slots(queue_pair& q, uint32_t mask, uint32_t members, uint32_t ticket,
                              Finisher& finisher) {
  deadline limit(q.data);
  const bool mine = (members >> warp::lane()) & 1;
  while (warp::any(mask, mine && !slot_is_free(q, ticket))) {
    if (warp::any(mask, limit.passed() || atomic::load_relaxed(&q.failed) != 0)) {
      atomic::store_relaxed(&q.failed, 1u);
      return false;
    }
    help(q, mask, finisher);
  }
  return true;
}

// Waits until each lane's command is done; returns the lane's status field (0 for lanes that are
// not members). The slots stay ours, buffers included, until release_slot.
template <typename Finisher>
FW_DEVICE uint32_t wait_for_completions(queue_pair& q, uint32_t mask, uint32_t members,
                                        uint32_t ticket, Finisher& finisher) {
  deadline limit(q.data);
  const bool mine = (members >> warp::lane()) & 1;
  uint32_t status = 0;
  bool pending = mine;
  while (true) {
    if (pending) {
      // Acquire: pairs with the drainer's release, behind which the controller's data lies.
      const uint64_t word = atomic::load_acquire(&q.slots[entry_of(q, ticket)]);
      if (slot::phase_of(word) == slot::kDone) {
        status = slot::status_of(word);
        pending = false;
      }
    }
    if (!warp::any(mask, pending)) return status;
    if (warp::any(mask, limit.passed() || atomic::load_relaxed(&q.failed) != 0)) {
      atomic::store_relaxed(&q.failed, 1u);
      return pending ? kTimedOut : status;
    }
    help(q, mask, finisher);
  }
}

}  // namespace fw::nvme
