// The four regions of a direction, as the host sees them: requests, lists, results and statuses.
#pragma once

#include <cstdint>

#include "flashwarp/base/atomic.cuh"

namespace fw::batch {
inline constexpr uint32_t kRows = 0, kSequence = 1;
struct alignas(64) request {
  uint64_t ready;
  uint64_t buffer;
  uint64_t rows;
  uint64_t first;
  uint32_t kind;
};
struct alignas(64) result {
  uint64_t done;
  uint64_t failed;
};
}  // namespace fw::batch

namespace fw::native::pipeline {

// The host's view of the four regions of a direction.
struct Regions {
  batch::request* requests = nullptr;
  batch::result* results = nullptr;
  int64_t* lists = nullptr;
  uint16_t* all_statuses = nullptr;
  uint32_t count = 0;
  uint64_t rows_max = 0;

  uint32_t slots() const { return count; }
  uint32_t slot(uint64_t ticket) const { return uint32_t(ticket & (count - 1)); }
  int64_t* list(uint64_t ticket) const { return lists + slot(ticket) * rows_max; }
  uint16_t* statuses(uint64_t ticket) const { return all_statuses + slot(ticket) * rows_max; }
  bool take(uint64_t ticket, batch::request& found) const {
    batch::request& from = requests[slot(ticket)];
    if (atomic::load_acquire(&from.ready) != ticket) return false;
    found = {ticket, from.buffer, from.rows, from.first, from.kind};
    return true;
  }
  void finish(uint64_t ticket, uint64_t failed) const {
    batch::result& to = results[slot(ticket)];
    to.failed = failed;
    atomic::store_release(&to.done, ticket);
  }
  void set_failed(uint64_t ticket, uint64_t failed) const { results[slot(ticket)].failed = failed; }
  bool ended(uint64_t ticket) const {
    return atomic::load_acquire(&results[slot(ticket)].done) >= ticket;
  }
  bool is_free(uint64_t ticket) const { return ticket <= count || ended(ticket - count); }
  void submit(uint64_t ticket, const batch::request& request) const {
    batch::request& to = requests[slot(ticket)];
    to.buffer = request.buffer;
    to.rows = request.rows;
    to.first = request.first;
    to.kind = request.kind;
    atomic::store_release(&to.ready, ticket);
  }
  uint64_t done_word(uint64_t ticket) const {
    return reinterpret_cast<uint64_t>(&results[slot(ticket)].done);
  }
};

}  // namespace fw::native::pipeline
