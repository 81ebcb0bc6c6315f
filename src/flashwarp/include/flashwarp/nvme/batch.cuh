// Batches: commands that somebody waits for together, without a thread of the device.
//
// The device counts the commands that it submits to a batch, a controller those that it completes.
// Whoever sees that both are equal stores `done`, a word for which a stream can wait. The word is
// advice: the data of a command is ordered by its completion, as always.
//
// While nobody runs on the device, nobody drains. So commands of a batch take only slots that are
// free, in rings that a controller can empty without another drain (`try_take_tickets`).
#pragma once

#include "flashwarp/nvme/submission_queue.cuh"

namespace fw::nvme {

// A batch as device and host share it, in host memory. The counts run on for ever.
struct alignas(64) batch_record {
  uint32_t submitted;  // the device's: commands, when the last launch of the batch ended
  uint32_t completed;  // the controllers': commands whose completion was posted
  uint32_t done;       // 1: no command is outstanding; or the host has given up to wait for them
  uint32_t watched;    // the host's: 1 while it sees to it that `done` becomes 1
};
static_assert(sizeof(batch_record) == 64);
FW_CHECK_OFFSET(batch_record, completed, 4);
FW_CHECK_OFFSET(batch_record, done, 8);
FW_CHECK_OFFSET(batch_record, watched, 12);

// A batch as launches use it, one at a time, in device memory.
struct alignas(64) batch {
  batch_record* record;
  uint32_t number;     // in its commands, from 1 on
  uint32_t submitted;  // commands, ever
  uint32_t published;  // of the record's `submitted`, the last value
  uint32_t ended;      // warps of the present launch that submit no more
};
static_assert(sizeof(batch) == 64);
FW_CHECK_OFFSET(batch, number, 8);
FW_CHECK_OFFSET(batch, ended, 20);

// The batch of a Read is in CDW3, which is reserved without protection information; 0: none.
FW_HOST_DEVICE uint32_t batch_of(const command& entry) {
  return (entry.opcode_cid & 0xff) == kRead ? entry.cdw3 : 0;
}

// How often a warp tries to take tickets while others take some.
inline constexpr uint32_t kTicketTries = 8;

// How many more commands a ring has room for that need no drain: a controller fetches them, and
// their completions find room in the CQ, although those of all commands before them lie there, too.
// If this warp does not see yet how much was fetched, the warp that drained publishes for it.
FW_DEVICE uint32_t room_of(const queue_pair& q, uint32_t ticket) {
  const uint32_t most = (1u << q.depth_log2) - 1;
  const uint32_t undrained = ticket - atomic::load_relaxed(&q.head);
  return undrained < most ? most - undrained : 0;
}

// Gives the lowest lanes of `members` consecutive tickets whose slots are free, as many as can be
// had without waiting. Returns these lanes.
FW_DEVICE uint32_t try_take_tickets(queue_pair& q, uint32_t mask, uint32_t members,
                                    uint32_t& ticket) {
  const uint32_t leader = base::lowest_bit(mask);
  const bool mine = (members >> warp::lane()) & 1;
  const uint32_t rank = warp::rank_in(members);
  for (uint32_t tries = 0; tries < kTicketTries; tries++) {
    uint32_t first = 0;
    uint32_t room = 0;
    if (warp::lane() == leader && atomic::load_relaxed(&q.failed) == 0) {
      first = atomic::load_relaxed(&q.ticket);
      room = room_of(q, first);
    }
    first = warp::broadcast(mask, first, leader);
    room = warp::broadcast(mask, room, leader);
    ticket = first + rank;
    // A free slot stays free until the owner of its ticket writes.
    const bool fits = mine && rank < room && slot_is_free(q, ticket);
    const uint32_t gap = members & ~warp::ballot(mask, fits);
    const uint32_t lanes = gap == 0 ? members : members & ((1u << base::lowest_bit(gap)) - 1);
    if (lanes == 0) return 0;
    bool took = false;
    if (warp::lane() == leader) {
      took = atomic::cas_acq_rel(&q.ticket, first, first + base::popcount(lanes));
    }
    if (warp::any(mask, took)) return lanes;
  }
  return 0;
}

// Ends the part of a warp in a launch of `warps` warps; one lane, behind the warp's submissions.
// The last one publishes what the batch waits for.
FW_DEVICE void end_part(batch& b, uint32_t warps) {
  // Release: what this warp has added to `submitted`. The last one acquires it, by the fence.
  if (atomic::add_release(&b.ended, 1u) != warps - 1) return;
  atomic::fence();
  atomic::store_relaxed(&b.ended, 0u);
  const uint32_t submitted = atomic::load_relaxed(&b.submitted);
  // Nothing was submitted since `done` became 1, or will become it.
  if (submitted == atomic::load_relaxed(&b.published)) return;
  atomic::store_relaxed(&b.published, submitted);
  batch_record& r = *b.record;
  atomic::store_relaxed_system(&r.done, 0u);
  atomic::store_relaxed_system(&r.submitted, submitted);
  // The host changes `completed` or `watched`, and then looks at `submitted` or stores `done`, with
  // the same fence in between. So its store comes behind ours, or we see its change.
  atomic::fence_sequential_system();
  const bool completed = atomic::load_relaxed_system(&r.completed) == submitted;
  if (completed || atomic::load_relaxed_system(&r.watched) == 0) {
    atomic::store_relaxed_system(&r.done, 1u);
  }
}

}  // namespace fw::nvme
