// The four regions through which a submitter hands batches of rows to the host's engine.
//
// A submitter is a block of threads, or a stream. It fills the list of a slot (region 1) and the
// arguments (2), and then stores the ticket in `ready` (3). The engine's polling thread takes
// tickets in their order, workers move the rows, and the engine stores `done` (4). One set of
// regions serves one direction and one kind of submitter. Every word has one writer: regions 1 to 3
// the submitter, region 4 and statuses the host.
//
// There are as many requests as slots. Ticket t, from 1 on, has request t mod slots, and the slot
// that the request names: kernels give slots back in any order, so a slot that one block keeps must
// not stand in the way of others. A slot is free once its last ticket is done and its submitter has
// read what became of it. As no more tickets are in use than there are slots, one of the last
// `slots` tickets is done when another one is taken. So its request was taken, because the engine
// takes in order, and may be written again.
#pragma once

#include "flashwarp/base/atomic.cuh"

namespace fw::batch {

// What a batch names: the rows of its list, or `rows` rows from `first` on.
inline constexpr uint32_t kRows = 0;
inline constexpr uint32_t kSequence = 1;

// Arguments of a batch, written by its submitter.
struct alignas(64) request {
  uint64_t ready;   // the ticket whose list and arguments are complete; stored last
  uint64_t buffer;  // where row 0 goes to, or comes from
  uint64_t rows;    // at most `rows_max`
  uint64_t first;   // of a sequence: its first row
  uint32_t kind;
  uint32_t place;  // the slot, plus one; 0: slot number `ready` mod slots
  uint64_t after;  // the last ticket of the other direction that was given out before this one
};
static_assert(sizeof(request) == 64);

// What became of a batch, written by the host.
struct alignas(64) result {
  uint64_t done;    // the ticket that has ended, well or not; stored last
  uint64_t failed;  // rows of it that failed. If there are any, all of its statuses are written.
};
static_assert(sizeof(result) == 64);

// Where the regions of a direction are. Host memory that the device can reach; the results may lie
// in the device's memory instead, if a stream stores them.
struct regions {
  request* requests = nullptr;
  result* results = nullptr;
  int64_t* lists = nullptr;          // rows_max of each slot
  uint16_t* all_statuses = nullptr;  // of NVMe, rows_max of each slot; 0: the row was moved
  uint32_t count = 0;                // slots, a power of two
  uint32_t reserved = 0;
  uint64_t rows_max = 0;

  // The request of a ticket; and its slot, if the submitter does not choose one.
  FW_HOST_DEVICE uint32_t slot(uint64_t ticket) const { return uint32_t(ticket & (count - 1)); }
  FW_HOST_DEVICE uint32_t slot(const request& taken) const {
    return taken.place != 0 ? taken.place - 1 : slot(taken.ready);
  }
  FW_HOST_DEVICE int64_t* list(uint32_t slot) const { return lists + slot * rows_max; }
  FW_HOST_DEVICE uint16_t* statuses(uint32_t slot) const { return all_statuses + slot * rows_max; }
};
static_assert(sizeof(regions) == 48);

}  // namespace fw::batch
