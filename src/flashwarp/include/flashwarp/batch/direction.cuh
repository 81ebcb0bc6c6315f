// The device's half of batches: blocks take tickets, fill slots, wait, and give slots back.
//
// All threads of a block call a function together, and its first thread leads. A block takes
// tickets only once their slots are free, and from then on waits for nothing until they are
// published. So the engine, which takes tickets in their order, never waits for one for long, and a
// wait that runs out of time leaves nothing behind. Waits have the time limit of the direction, and
// note in its record what they waited for.
#pragma once

#include "flashwarp/base/block.cuh"
#include "flashwarp/batch/regions.cuh"
#include "flashwarp/cache/error_record.cuh"
#include "flashwarp/nvme/queue_pair.cuh"

namespace fw::batch {

// What the record of a direction says. `where` is the ticket, or the rows of what is too long.
enum fault : uint32_t {
  kNoFreeSlot = 1,  // waited for a slot: the batches in all slots were not synchronized
  kNotDone = 2,     // waited for the engine to end the ticket
  kNotAll = 3,      // waited for the other blocks of the launch to make the same call
  kTooLong = 4,     // more rows than all slots hold, which is `limit`
  kNoBatch = 5,     // to synchronize: no such batch is in flight
};

// Returned in place of a ticket by calls that were refused: the record says why.
inline constexpr uint64_t kRefused = 0;
// Stands for the oldest batch in flight.
inline constexpr uint64_t kOldest = ~uint64_t(0);
// Returned in place of a number of failed rows, if the batch was not synchronized.
inline constexpr uint64_t kNotSynchronized = ~uint64_t(0);

// A slot as kernels see it. Zero: never used.
struct slot_state {
  uint64_t issued;   // the last ticket that was published here, as `issue` makes it
  uint64_t retired;  // the last ticket that was synchronized here
};
static_assert(sizeof(slot_state) == 16);

// Bits 63:16 the ticket, 15 whether somebody synchronizes it, 14:0 the parts of the batch if the
// ticket is its first one, else 0.
namespace issue {
inline constexpr uint64_t kClaimed = 1u << 15;
inline constexpr uint64_t kParts = kClaimed - 1;
FW_DEVICE uint64_t word(uint64_t ticket, uint64_t parts) { return ticket << 16 | parts; }
FW_DEVICE uint64_t ticket_of(uint64_t word) { return word >> 16; }
FW_DEVICE uint64_t parts_of(uint64_t word) { return word & kParts; }
}  // namespace issue

// One direction as launches use it, in device memory. The changing half begins as zeros.
struct alignas(128) direction {
  regions shared;
  slot_state* states;
  cache::failure* failures;  // host-visible: kFailuresKept entries
  nvme::transport limit;     // `timeout_ns` and `heartbeat`; the rest is not used
  uint64_t row_bytes;
  uint64_t reserved;
  alignas(128) uint64_t taken;  // the last ticket that was taken
  uint64_t ended;               // all tickets up to this one were synchronized, or more
  uint64_t meeting;             // bits 63:32 meetings of the grid, 31:0 blocks at the present one
  uint64_t found;               // what the last block has found at the last meeting
  cache::failure_log log;
};
static_assert(sizeof(direction) == 256);
FW_CHECK_OFFSET(direction, states, 48);
FW_CHECK_OFFSET(direction, failures, 56);
FW_CHECK_OFFSET(direction, limit, 64);
FW_CHECK_OFFSET(direction, row_bytes, 112);
FW_CHECK_OFFSET(direction, taken, 128);
FW_CHECK_OFFSET(direction, ended, 136);
FW_CHECK_OFFSET(direction, meeting, 144);
FW_CHECK_OFFSET(direction, found, 152);
FW_CHECK_OFFSET(direction, log, 160);

FW_DEVICE void note(direction& d, fault what, uint64_t where, uint64_t limit = 0) {
  cache::note_failure(d.log, d.failures, where, what, 0, limit);
}

FW_DEVICE slot_state& state_of(const direction& d, uint64_t ticket) {
  return d.states[d.shared.slot(ticket)];
}

// Takes `parts` consecutive tickets whose slots are free, and returns the first. One thread.
FW_DEVICE_NOINLINE uint64_t take_tickets(direction& d, uint64_t parts) {
  nvme::deadline limit(d.limit);
  while (true) {
    const uint64_t first = atomic::load_relaxed(&d.taken) + 1;
    uint64_t free = 0;
    // Acquire: all looks at the slot's last result and statuses are over, and the engine's at its
    // list, which somebody has acquired from `done`. A free slot stays free until its ticket is
    // taken, so taking it orders nothing more.
    while (free < parts &&
           atomic::load_acquire(&state_of(d, first + free).retired) + d.shared.count >=
               first + free) {
      free++;
    }
    if (free == parts && atomic::cas_relaxed(&d.taken, first - 1, first - 1 + parts)) return first;
    if (limit.passed()) {
      note(d, kNoFreeSlot, first);
      return kRefused;
    }
    base::pause(nvme::kBackOffNs);
  }
}

// Publishes the tickets of a batch, whose lists are complete. One thread.
FW_DEVICE_NOINLINE void publish(direction& d, uint64_t first, uint64_t parts, uint64_t rows,
                                uint64_t sequence, uint32_t kind, uint64_t buffer) {
  for (uint64_t part = 0; part < parts; part++) {
    const uint64_t begin = part * d.shared.rows_max;
    const uint64_t rest = rows - begin;
    request& to = d.shared.requests[d.shared.slot(first + part)];
    atomic::store_plain(&to.buffer, buffer + begin * d.row_bytes);
    atomic::store_plain(&to.rows, rest < d.shared.rows_max ? rest : d.shared.rows_max);
    atomic::store_plain(&to.first, sequence + begin);
    atomic::store_plain(&to.kind, kind);
  }
  // The engine takes a ticket as soon as it sees `ready`. Before that come the arguments, the lists
  // of all threads, the rows that they have stored for a write, and their loads of the buffer that
  // a read overwrites: their barrier has put all of it before this fence.
  atomic::fence_system();
  for (uint64_t part = 0; part < parts; part++) {
    const uint64_t ticket = first + part;
    atomic::store_relaxed_system(&d.shared.requests[d.shared.slot(ticket)].ready, ticket);
    // Release: who synchronizes the batch reads `rows` of its requests.
    atomic::store_release(&state_of(d, ticket).issued, issue::word(ticket, part ? 0 : parts));
  }
}

// Submits a batch: the rows that `ids` name, or if it is null those from `sequence` on. Returns the
// ticket of its first part, or kRefused. All threads of a block, with the same arguments.
template <typename Id>
FW_DEVICE uint64_t submit(direction& d, const Id* ids, uint64_t sequence, uint64_t rows,
                          const void* buffer) {
  const uint64_t rows_max = d.shared.rows_max;
  const uint64_t parts = rows == 0 ? 1 : (rows - 1) / rows_max + 1;
  const bool leads = block::rank() == 0;
  uint64_t first = kRefused;
  if (leads && parts > d.shared.count) note(d, kTooLong, rows, d.shared.count * rows_max);
  if (leads && parts <= d.shared.count) first = take_tickets(d, parts);
  // The first thread has acquired the slots for all; and all threads have computed their ids.
  first = block::broadcast(first);
  if (first == kRefused) return kRefused;
  if (ids != nullptr) {
    uint64_t begin = 0;
    for (uint64_t part = 0; part < parts; part++, begin += rows_max) {
      int64_t* list = d.shared.list(first + part);
      const uint64_t count = rows - begin < rows_max ? rows - begin : rows_max;
      for (uint64_t i = block::rank(); i < count; i += block::size()) {
        atomic::store_plain(&list[i], int64_t(atomic::load_plain(&ids[begin + i])));
      }
    }
  }
  block::sync();
  if (leads) {
    publish(d, first, parts, rows, sequence, ids != nullptr ? kRows : kSequence,
            reinterpret_cast<uint64_t>(buffer));
  }
  return first;
}

// Waits until a ticket has ended. Returns false after the time limit. One thread.
FW_DEVICE bool wait_for(direction& d, uint64_t ticket) {
  nvme::deadline limit(d.limit);
  const result& r = d.shared.results[d.shared.slot(ticket)];
  while (atomic::load_relaxed_system(&r.done) < ticket) {
    if (limit.passed()) {
      note(d, kNotDone, ticket);
      return false;
    }
    base::pause(nvme::kBackOffNs);
  }
  return true;
}

// Waits for all parts of the batch that a word of `issued` names. One thread.
FW_DEVICE bool wait_for_parts(direction& d, uint64_t issued) {
  for (uint64_t part = 0; part < issue::parts_of(issued); part++) {
    if (!wait_for(d, issue::ticket_of(issued) + part)) return false;
  }
  // What the engine has stored before each `done`: rows, statuses and their counts.
  atomic::fence_system();
  return true;
}

// Whether a word of `issued` names a batch that nobody synchronizes.
FW_DEVICE bool is_waiting(uint64_t issued) {
  return (issued & issue::kClaimed) == 0 && issue::parts_of(issued) != 0;
}

// Finds the oldest batch that nobody synchronizes. Returns its word of `issued`; 0: there is none,
// or a ticket was taken and is not published in time. One thread.
FW_DEVICE_NOINLINE uint64_t find_oldest(direction& d) {
  nvme::deadline limit(d.limit);
  while (true) {
    // Acquire: the tickets that those had taken who have moved this word, or claimed the batch.
    const uint64_t ended = atomic::load_acquire(&d.ended);
    const uint64_t ticket = ended + 1;
    // Relaxed: whoever may ask for the oldest batch has seen its ticket taken, or will see it
    // later.
    if (atomic::load_relaxed(&d.taken) < ticket) return 0;
    const uint64_t issued = atomic::load_acquire(&state_of(d, ticket).issued);
    if (issue::ticket_of(issued) == ticket && is_waiting(issued)) return issued;
    if (issue::ticket_of(issued) >= ticket) {
      // Synchronized by its ticket, or a later part of such a batch.
      atomic::cas_acq_rel(&d.ended, ended, ticket);
      continue;
    }
    if (limit.passed()) return 0;
    base::pause(nvme::kBackOffNs);
  }
}

// Waits for a batch, and claims it: only one block synchronizes it. Returns its word of `issued`,
// or 0. One thread.
FW_DEVICE_NOINLINE uint64_t claim(direction& d, uint64_t ticket) {
  while (true) {
    const uint64_t issued =
        ticket == kOldest ? find_oldest(d) : atomic::load_acquire(&state_of(d, ticket).issued);
    const bool known = ticket == kOldest ? issued != 0 : issue::ticket_of(issued) == ticket;
    if (!known || !is_waiting(issued)) {
      note(d, kNoBatch, ticket == kOldest ? 0 : ticket);
      return 0;
    }
    // A batch that does not end stays as it is: a later call may wait for it again.
    if (!wait_for_parts(d, issued)) return 0;
    slot_state& state = state_of(d, issue::ticket_of(issued));
    // Release: see `find_oldest`.
    if (atomic::cas_acq_rel(&state.issued, issued, issued | issue::kClaimed)) return issued;
  }
}

// Copies the statuses of a batch, whose `failed` rows are not all well. All threads of the block.
FW_DEVICE void copy_statuses(const direction& d, uint64_t issued, uint64_t failed,
                             uint16_t* statuses) {
  using word = atomic::raw<2>;
  uint64_t begin = 0;
  for (uint64_t part = 0; part < issue::parts_of(issued); part++) {
    const uint64_t ticket = issue::ticket_of(issued) + part;
    const uint32_t slot = d.shared.slot(ticket);
    const uint64_t rows = atomic::load_plain(&d.shared.requests[slot].rows);
    const bool well = failed == 0 || atomic::load_plain(&d.shared.results[slot].failed) == 0;
    const uint16_t* from = d.shared.statuses(ticket);
    for (uint64_t i = block::rank(); i < rows; i += block::size()) {
      word::store_plain(&statuses[begin + i], well ? 0 : word::load_plain(&from[i]));
    }
    begin += rows;
  }
}

// Waits for a batch and gives its slots back. Returns how many of its rows failed, and stores the
// status of each row if the caller wants them; kNotSynchronized if there is no such batch, or it
// does not end in time. All threads of a block, with the same arguments.
FW_DEVICE_NOINLINE uint64_t synchronize(direction& d, uint64_t ticket, uint16_t* statuses) {
  const bool leads = block::rank() == 0;
  uint64_t issued = 0;
  uint64_t failed = 0;
  if (leads) {
    issued = claim(d, ticket);
    for (uint64_t part = 0; part < issue::parts_of(issued); part++) {
      const uint32_t slot = d.shared.slot(issue::ticket_of(issued) + part);
      failed += atomic::load_plain(&d.shared.results[slot].failed);
    }
  }
  // The first thread has acquired what the engine has stored, for all threads of the block.
  issued = block::broadcast(issued);
  if (issued == 0) return kNotSynchronized;
  failed = block::broadcast(failed);
  if (statuses != nullptr) copy_statuses(d, issued, failed, statuses);
  block::sync();
  if (leads) {
    const uint64_t first = issue::ticket_of(issued);
    const uint64_t parts = issue::parts_of(issued);
    for (uint64_t part = 0; part < parts; part++) {
      // Release: the looks of all threads at the result come before the slot's next use.
      atomic::store_release(&state_of(d, first + part).retired, first + part);
    }
    // Release: see `find_oldest`.
    atomic::cas_acq_rel(&d.ended, first - 1, first - 1 + parts);
  }
  return failed;
}

// A block comes to a meeting of the launch. Returns the word of the meeting as it found it.
FW_DEVICE uint64_t arrive(direction& d) {
  // Release: what the block's threads have stored and loaded, which their barrier has put before.
  const uint64_t before = atomic::add_release(&d.meeting, uint64_t(1));
  // The last block acquires what all others have released.
  atomic::fence();
  return before;
}

// Waits until the last block has ended a meeting. After the time limit the block leaves the meeting
// unless all have come, and returns false. One thread.
FW_DEVICE_NOINLINE bool wait_for_meeting(direction& d, uint64_t arrived) {
  const uint32_t number = uint32_t(arrived >> 32);
  nvme::deadline limit(d.limit);
  while (true) {
    // Acquire: what the last block has found, and all that it has acquired from the engine.
    const uint64_t seen = atomic::load_acquire(&d.meeting);
    if (uint32_t(seen >> 32) != number) return true;
    // Once all have come, the waits of the last block have limits.
    if (uint32_t(seen) != block::count() && limit.passed() &&
        atomic::cas_relaxed(&d.meeting, seen, seen - 1)) {
      note(d, kNotAll, uint32_t(seen), block::count());
      return false;
    }
    base::pause(nvme::kBackOffNs);
  }
}

// All blocks of the launch meet; the last one to come does `work`, and all return what it has
// returned, or `refused` if some do not come in time. All threads of all blocks.
template <typename Work>
FW_DEVICE uint64_t meet(direction& d, uint64_t refused, Work work) {
  const bool leads = block::rank() == 0;
  block::sync();
  uint64_t before = 0;
  if (leads) before = arrive(d);
  const bool is_last = leads && uint32_t(before) + 1 == block::count();
  if (block::any(is_last)) {
    const uint64_t found = work();
    if (leads) {
      atomic::store_relaxed(&d.found, found);
      // Release: what was found, and for reads the rows; the next meeting begins without blocks.
      atomic::store_release(&d.meeting, ((before >> 32) + 1) << 32);
    }
    return found;
  }
  uint64_t found = refused;
  if (leads && wait_for_meeting(d, before)) found = atomic::load_relaxed(&d.found);
  return block::broadcast(found);
}

}  // namespace fw::batch
