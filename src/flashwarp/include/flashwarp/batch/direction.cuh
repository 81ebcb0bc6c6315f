// The device's half of batches: blocks take tickets, fill slots, wait, and give slots back.
//
// All threads of a block call a function together, and its first thread leads. A block takes
// tickets only once there are slots for them, and from then on waits for nothing until they are
// published. So the engine, which takes tickets in their order, never waits for one for long, and a
// wait that runs out of time leaves nothing behind. Waits have the time limit of the direction, and
// note in its record what they waited for. Once one has run out of time, later ones for the engine,
// or for a slot that nobody gives back, fail at once, until the engine has ended what that one
// waited for, or the host has read the record. So a kernel of many rounds ends soon.
#pragma once

#include "flashwarp/base/block.cuh"
#include "flashwarp/batch/regions.cuh"
#include "flashwarp/cache/error_record.cuh"
#include "flashwarp/nvme/queue_pair.cuh"

namespace fw::batch {

// What the record of a direction says. `where` is the ticket, or the rows of what is too long.
enum fault : uint32_t {
  kNoFreeSlot = 1,  // waited for a slot: the batches in all slots were not waited for
  kNotDone = 2,     // waited for the engine to end the ticket
  kNotAll = 3,      // waited for the other blocks of the launch to make the same call
  kTooLong = 4,     // more rows than all slots hold, which is `limit`
  kNoBatch = 5,     // to wait for: no such batch is in flight
};

// Returned in place of a ticket by calls that were refused: the record says why.
inline constexpr uint64_t kRefused = 0;
// Stands for the oldest batch in flight.
inline constexpr uint64_t kOldest = ~uint64_t(0);
// Returned in place of a number of failed rows, if the batch was not waited for.
inline constexpr uint64_t kNotWaited = ~uint64_t(0);

// A slot as kernels see it. Zeros: never used. A batch of several parts has a chain of slots.
struct alignas(32) slot_state {
  uint64_t issued;  // the last batch that begins in this slot, as `issue` makes it
  uint64_t rows;    // of that batch
  uint32_t held;    // 1: from the submission until the batch was waited for
  uint32_t next;    // the slot of the batch's next part
  uint64_t reserved;
};
static_assert(sizeof(slot_state) == 32);

// Of a slot: bits 63:16 the ticket, 15 whether somebody waits for the batch, 14:0 its parts.
namespace issue {
inline constexpr uint64_t kClaimed = 1u << 15;
inline constexpr uint64_t kParts = kClaimed - 1;
FW_DEVICE uint64_t word(uint64_t ticket, uint64_t parts) { return ticket << 16 | parts; }
FW_DEVICE uint64_t ticket_of(uint64_t word) { return word >> 16; }
FW_DEVICE uint64_t parts_of(uint64_t word) { return word & kParts; }
// Whether it names a batch that nobody waits for.
FW_DEVICE bool is_waiting(uint64_t word) { return (word & kClaimed) == 0 && parts_of(word) != 0; }
}  // namespace issue

// What kernel authors get as a ticket: bits 63:16 that of the first part, 15:0 its slot.
namespace handle {
FW_DEVICE uint64_t word(uint64_t ticket, uint32_t slot) { return ticket << 16 | slot; }
FW_DEVICE uint64_t ticket_of(uint64_t word) { return word >> 16; }
FW_DEVICE uint32_t slot_of(uint64_t word) { return uint32_t(word) & 0xffff; }
}  // namespace handle

// The most slots: their numbers, and the parts of a batch, have 15 bits.
inline constexpr uint32_t kSlotsMax = 1u << 14;

// One direction as launches use it, in device memory. The changing half begins as zeros.
struct alignas(128) direction {
  regions shared;
  slot_state* states;
  cache::failure* failures;  // host-visible: kFailuresKept entries
  nvme::transport limit;     // `timeout_ns` and `heartbeat`; the rest is not used
  uint64_t row_bytes;
  const direction* other;       // of the same storage; null: there is none
  alignas(128) uint64_t taken;  // bits 63:16 the last ticket that was taken, 15:0 slots in use
  uint64_t meeting;             // bits 63:32 meetings of the grid, 31:0 blocks at the present one
  uint64_t found;               // what the last block has found at the last meeting
  cache::failure_log log;
  // What was waited for in vain. Hints: whoever misses one only waits for longer.
  uint64_t late;    // the handle of a part that the engine has not ended in time; 0: none
  uint64_t full;    // `taken` when no slot came free in time; 0: never
  uint32_t looked;  // `log.read` at the last time: the host has looked since if that has changed
};
static_assert(sizeof(direction) == 256);

FW_DEVICE void note(direction& d, fault what, uint64_t where, uint64_t limit = 0) {
  cache::note_failure(d.log, d.failures, where, what, 0, limit);
}

// Whether the host has read the record since a wait last ran out of time.
FW_DEVICE bool host_has_looked(const direction& d) {
  return atomic::load_relaxed_system(&d.log.read) != atomic::load_relaxed(&d.looked);
}

// Leaves a mark, `late` or `full`, of what was waited for in vain, before it is noted: what the
// host reads from then on counts as a look.
FW_DEVICE void leave_mark(direction& d, uint64_t* mark, uint64_t what) {
  atomic::store_relaxed(&d.looked, atomic::load_relaxed_system(&d.log.read));
  atomic::store_relaxed(mark, what);
}

// Whether the engine still owes the end of a part that was waited for in vain.
FW_DEVICE bool engine_is_late(const direction& d) {
  const uint64_t late = atomic::load_relaxed(&d.late);
  if (late == 0 || host_has_looked(d)) return false;
  // The tickets of a slot only grow: a later one says, too, that this one has ended.
  const result& r = d.shared.results[handle::slot_of(late)];
  return atomic::load_relaxed_system(&r.done) < handle::ticket_of(late);
}

// Takes `parts` consecutive tickets once as many slots are free, and returns the first. One thread.
FW_DEVICE_NOINLINE uint64_t take_tickets(direction& d, uint64_t parts) {
  nvme::deadline limit(d.limit);
  const bool late = engine_is_late(d);
  const uint64_t full = host_has_looked(d) ? 0 : atomic::load_relaxed(&d.full);
  while (true) {
    const uint64_t seen = atomic::load_relaxed(&d.taken);
    const uint64_t ticket = (seen >> 16) + 1;
    const bool fits = (seen & 0xffff) + parts <= d.shared.count;
    // Acquire: what those have seen of the engine who gave slots back. So the engine's looks at the
    // requests of these tickets are over; see regions.cuh.
    if (fits && atomic::cas_acq_rel(&d.taken, seen, seen + (parts << 16) + parts)) return ticket;
    // No slot was taken or given back since `full`: then the word would be another one.
    const bool in_vain = !fits && (late || seen == full);
    if (in_vain || limit.passed()) {
      if (!in_vain) leave_mark(d, &d.full, seen);
      note(d, kNoFreeSlot, ticket);
      return kRefused;
    }
    base::pause(nvme::kBackOffNs);
  }
}

// Takes a slot for a ticket that was taken, so there is one. One thread.
FW_DEVICE_NOINLINE uint32_t hold_slot(direction& d, uint64_t ticket) {
  for (uint32_t slot = d.shared.slot(ticket);; slot = d.shared.slot(uint64_t(slot) + 1)) {
    uint32_t* held = &d.states[slot].held;
    // Acquire: all looks at the slot's last result and statuses are over, and the engine's at its
    // list, which somebody has acquired from `done`.
    if (atomic::load_relaxed(held) == 0 && atomic::cas_acq_rel(held, 0u, 1u)) return slot;
  }
}

// What the parts of a batch have in common.
struct submission {
  uint64_t ticket;  // of the first part
  uint64_t rows;
  uint64_t sequence;
  uint64_t buffer;
  uint32_t kind;
  uint64_t after = 0;  // the last ticket of the other direction
};

// Fills the request of a part. One thread.
FW_DEVICE void fill_request(direction& d, const submission& s, uint64_t part, uint32_t slot) {
  const uint64_t begin = part * d.shared.rows_max;
  const uint64_t rest = s.rows - begin;
  request& to = d.shared.requests[d.shared.slot(s.ticket + part)];
  atomic::store_plain(&to.buffer, s.buffer + begin * d.row_bytes);
  atomic::store_plain(&to.rows, rest < d.shared.rows_max ? rest : d.shared.rows_max);
  atomic::store_plain(&to.first, s.sequence + begin);
  atomic::store_plain(&to.kind, s.kind);
  atomic::store_plain(&to.place, slot + 1);
  atomic::store_plain(&to.after, s.after);
}

// Publishes the tickets of a batch, whose requests and lists are complete. One thread.
FW_DEVICE_NOINLINE void publish(direction& d, uint64_t ticket, uint64_t parts, uint64_t rows,
                                uint32_t slot) {
  atomic::store_relaxed(&d.states[slot].rows, rows);
  // The engine takes a ticket as soon as it sees `ready`. Before that come the arguments, the lists
  // of all threads, the rows that they have stored for a write, and their loads of the buffer that
  // a read overwrites: their barrier has put all of it before this fence.
  atomic::fence_system();
  for (uint64_t part = 0; part < parts; part++) {
    request& to = d.shared.requests[d.shared.slot(ticket + part)];
    atomic::store_relaxed_system(&to.ready, ticket + part);
  }
  // Behind the fence: who waits for the batch reads its rows and follows its chain.
  atomic::store_relaxed(&d.states[slot].issued, issue::word(ticket, parts));
}

// Submits a batch: the rows that `ids` name, or if it is null those from `sequence` on. Returns its
// handle, or kRefused. All threads of a block, with the same arguments.
template <typename Id>
FW_DEVICE uint64_t submit(direction& d, const Id* ids, uint64_t sequence, uint64_t rows,
                          const void* buffer) {
  const uint64_t rows_max = d.shared.rows_max;
  const uint64_t parts = rows == 0 ? 1 : (rows - 1) / rows_max + 1;
  const bool leads = block::rank() == 0;
  uint64_t ticket = kRefused;
  // Before the ticket is taken: two batches never come after each other. Relaxed: what this block
  // has submitted, and what was submitted before a barrier or word that it has seen, is counted.
  uint64_t after = 0;
  if (leads && d.other != nullptr) after = atomic::load_relaxed(&d.other->taken) >> 16;
  if (leads && parts > d.shared.count) note(d, kTooLong, rows, d.shared.count * rows_max);
  if (leads && parts <= d.shared.count) ticket = take_tickets(d, parts);
  ticket = block::broadcast(ticket);
  if (ticket == kRefused) return kRefused;
  submission s = {ticket, rows, sequence, reinterpret_cast<uint64_t>(buffer),
                  ids != nullptr ? kRows : kSequence};
  s.after = after;
  uint32_t first = 0;
  uint32_t slot = 0;
  for (uint64_t part = 0; part < parts; part++) {
    const uint32_t before = slot;
    // The first thread acquires the slot for all; and all threads have computed their ids.
    slot = uint32_t(block::broadcast(leads ? hold_slot(d, ticket + part) : 0));
    if (part == 0) first = slot;
    if (leads && part != 0) atomic::store_relaxed(&d.states[before].next, slot);
    if (leads) fill_request(d, s, part, slot);
    if (ids == nullptr) continue;
    int64_t* list = d.shared.list(slot);
    const uint64_t begin = part * rows_max;
    const uint64_t count = rows - begin < rows_max ? rows - begin : rows_max;
    for (uint64_t i = block::rank(); i < count; i += block::size()) {
      atomic::store_plain(&list[i], int64_t(atomic::load_plain(&ids[begin + i])));
    }
  }
  block::sync();
  if (leads) publish(d, ticket, parts, rows, first);
  return handle::word(ticket, first);
}

// Waits until a part has ended. Returns false after the time limit, or in vain. One thread.
FW_DEVICE bool wait_for(direction& d, uint64_t ticket, uint32_t slot) {
  nvme::deadline limit(d.limit);
  const bool in_vain = engine_is_late(d);
  const result& r = d.shared.results[slot];
  while (atomic::load_relaxed_system(&r.done) != ticket) {
    if (in_vain || limit.passed()) {
      if (!in_vain) leave_mark(d, &d.late, handle::word(ticket, slot));
      note(d, kNotDone, ticket);
      return false;
    }
    base::pause(nvme::kBackOffNs);
  }
  return true;
}

// Finds the oldest batch that nobody waits for. Returns its handle; kRefused: there is none. One
// thread.
FW_DEVICE_NOINLINE uint64_t find_oldest(const direction& d) {
  uint64_t before = 0;
  while (true) {
    uint64_t oldest = 0;
    uint32_t place = 0;
    uint64_t mix = 1;
    for (uint32_t slot = 0; slot < d.shared.count; slot++) {
      // Acquire: the batches that those had submitted who claimed this one.
      const uint64_t issued = atomic::load_acquire(&d.states[slot].issued);
      mix = mix * 0x9E3779B97F4A7C15u + issued;
      if (issue::is_waiting(issued) && (oldest == 0 || issued < oldest)) {
        oldest = issued;
        place = slot;
      }
    }
    if (oldest != 0) return handle::word(issue::ticket_of(oldest), place);
    // What was acquired from one slot may show a batch in another one, which came earlier.
    if (mix == before) return kRefused;
    before = mix;
  }
}

// Claims a batch: only one block waits for it. Returns its handle, or kRefused. One thread.
FW_DEVICE_NOINLINE uint64_t claim(direction& d, uint64_t wanted) {
  while (true) {
    const uint64_t found = wanted == kOldest ? find_oldest(d) : wanted;
    const uint32_t slot = handle::slot_of(found);
    if (found != kRefused && slot < d.shared.count) {
      uint64_t* issued = &d.states[slot].issued;
      // Acquire: see `publish`.
      const uint64_t seen = atomic::load_acquire(issued);
      // Release: see `find_oldest`.
      if (issue::ticket_of(seen) == handle::ticket_of(found) && issue::is_waiting(seen) &&
          atomic::cas_acq_rel(issued, seen, seen | issue::kClaimed)) {
        return found;
      }
      if (wanted == kOldest) continue;
    }
    note(d, kNoBatch, wanted == kOldest ? 0 : handle::ticket_of(wanted));
    return kRefused;
  }
}

// Waits for all parts of a batch that was claimed. Returns how many rows failed. If the batch does
// not end in time, a later call may claim it again, and it returns kNotWaited. One thread.
FW_DEVICE_NOINLINE uint64_t wait_for_batch(direction& d, uint64_t batch) {
  const uint32_t first = handle::slot_of(batch);
  const uint64_t issued = atomic::load_relaxed(&d.states[first].issued);
  uint64_t failed = 0;
  uint32_t slot = first;
  for (uint64_t part = 0; part < issue::parts_of(issued); part++) {
    if (!wait_for(d, handle::ticket_of(batch) + part, slot)) {
      // Release: see `publish`, whose stores the next claim acquires by this one.
      atomic::store_release(&d.states[first].issued, issued & ~issue::kClaimed);
      return kNotWaited;
    }
    // What the engine has stored before `done`: rows, statuses and their count.
    atomic::fence_system();
    failed += atomic::load_plain(&d.shared.results[slot].failed);
    slot = atomic::load_relaxed(&d.states[slot].next);
  }
  return failed;
}

// Copies the statuses of a batch of which rows have failed, or none. All threads of the block.
FW_DEVICE void copy_statuses(const direction& d, uint64_t batch, bool well, uint16_t* statuses) {
  using word = atomic::raw<2>;
  uint32_t slot = handle::slot_of(batch);
  const uint64_t rows = atomic::load_relaxed(&d.states[slot].rows);
  for (uint64_t begin = 0; begin < rows; begin += d.shared.rows_max) {
    const bool all_well = well || atomic::load_plain(&d.shared.results[slot].failed) == 0;
    const uint16_t* from = d.shared.statuses(slot);
    const uint64_t count = rows - begin < d.shared.rows_max ? rows - begin : d.shared.rows_max;
    for (uint64_t i = block::rank(); i < count; i += block::size()) {
      word::store_plain(&statuses[begin + i], all_well ? 0 : word::load_plain(&from[i]));
    }
    slot = atomic::load_relaxed(&d.states[slot].next);
  }
}

// Gives the slots of a batch back. One thread.
FW_DEVICE_NOINLINE void give_back(direction& d, uint64_t batch) {
  uint32_t slot = handle::slot_of(batch);
  const uint64_t parts = issue::parts_of(atomic::load_relaxed(&d.states[slot].issued));
  for (uint64_t part = 0; part < parts; part++) {
    const uint32_t next = atomic::load_relaxed(&d.states[slot].next);
    // Release: the looks of all threads at the result come before the slot's next use.
    atomic::store_release(&d.states[slot].held, 0u);
    slot = next;
  }
  // Release: the slots are free, and the engine has taken this batch's requests.
  atomic::add_release(&d.taken, ~parts + 1);
}

// Waits for a batch and gives its slots back. Returns how many of its rows failed, and stores the
// status of each row if the caller wants them; kNotWaited if there is no such batch, or it
// does not end in time. All threads of a block, with the same arguments.
FW_DEVICE_NOINLINE uint64_t wait(direction& d, uint64_t wanted, uint16_t* statuses) {
  const bool leads = block::rank() == 0;
  uint64_t batch = kRefused;
  uint64_t failed = kNotWaited;
  if (leads) batch = claim(d, wanted);
  if (leads && batch != kRefused) failed = wait_for_batch(d, batch);
  // The first thread has acquired what the engine has stored, for all threads of the block.
  failed = block::broadcast(failed);
  if (failed == kNotWaited) return failed;
  if (statuses != nullptr) copy_statuses(d, block::broadcast(batch), failed == 0, statuses);
  block::sync();
  if (leads) give_back(d, batch);
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
