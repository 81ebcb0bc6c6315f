// The host's half of batches: the engine takes requests and ends them. Host code only.
//
// The polling thread takes tickets, in their order. Any thread may end a ticket that was taken,
// once.
#pragma once

#include "flashwarp/batch/regions.cuh"

namespace fw::batch {

struct host_regions : regions {
  uint32_t slots() const { return count; }

  // Copies the arguments of `ticket` if it is ready. Its list may be read until `finish`.
  bool take(uint64_t ticket, request& found) const {
    const request& from = requests[slot(ticket)];
    // Acquire: the submitter's list and arguments, and for a write the rows themselves; for a read,
    // the submitter's last looks at the buffer, which is overwritten from now on.
    if (atomic::load_acquire(&from.ready) != ticket) return false;
    found.ready = ticket;
    found.buffer = atomic::load_plain(&from.buffer);
    found.rows = atomic::load_plain(&from.rows);
    found.first = atomic::load_plain(&from.first);
    found.kind = atomic::load_plain(&from.kind);
    found.after = atomic::load_plain(&from.after);
    const uint32_t place = atomic::load_plain(&from.place);
    // A place that does not exist is a stray store's, and must lead nowhere else.
    found.place = place <= count ? place : 0;
    return true;
  }

  // Writes the statuses of all rows of a batch, of which some have failed. Before `finish`.
  void report(const request& taken, const uint16_t* found, uint64_t rows) const {
    atomic::copy_plain(statuses(slot(taken)), found, rows * sizeof(uint16_t));
  }

  // Writes how many rows have failed, if a stream stores `done_word` behind its copies.
  void set_failed(const request& taken, uint64_t failed) const {
    atomic::store_plain(&results[slot(taken)].failed, failed);
  }

  // Ends a batch. The caller has acquired what all workers have moved.
  void finish(const request& taken, uint64_t failed) const {
    set_failed(taken, failed);
    // Release: the rows, the statuses and their count come before the word that a submitter awaits,
    // and the reads of the list before the submitter's next list.
    atomic::store_release(&results[slot(taken)].done, taken.ready);
  }

  uint64_t done_word(const request& taken) const {
    return reinterpret_cast<uint64_t>(&results[slot(taken)].done);
  }

  // For a submitter that is a thread of the host, and does not choose slots.

  bool ended(uint64_t ticket) const {
    // Acquire: see `finish`.
    return atomic::load_acquire(&results[slot(ticket)].done) >= ticket;
  }
  bool is_free(uint64_t ticket) const { return ticket <= count || ended(ticket - count); }
  void submit(uint64_t ticket, const request& filled) const {
    request& to = requests[slot(ticket)];
    atomic::store_plain(&to.buffer, filled.buffer);
    atomic::store_plain(&to.rows, filled.rows);
    atomic::store_plain(&to.first, filled.first);
    atomic::store_plain(&to.kind, filled.kind);
    atomic::store_plain(&to.after, filled.after);
    // Release: the list and the arguments, which `take` acquires.
    atomic::store_release(&to.ready, ticket);
  }
};
static_assert(sizeof(host_regions) == sizeof(regions));

}  // namespace fw::batch
