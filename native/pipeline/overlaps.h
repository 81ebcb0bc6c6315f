// Which rows of a batch wait: those that an earlier batch in flight stores, and of a write also
// those that an earlier one loads. All other rows go on beside each other.
//
// The polling thread's. Batches come in the order in which they were submitted. A row waits until
// the last batch has ended that it must come after; as each direction ends its batches in order,
// one of each direction stands for all.
//
// Rows that share a block of 512 bytes overlap, too. Rows that are no whole blocks are known by the
// units in which they lie, powers of two of at least a block and a row, so that neighbours may wait
// without need.
//
// While no write is in flight, nothing is looked up. Otherwise a row of a list costs a look-up in a
// hash table for each of its units, of which it has one or two, and 64 to 128 bytes for each until
// its batch has ended. A sequence is compared with the others in flight, and looked up by its units
// or in a pass over the table, whichever is shorter.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "pipeline/port.h"

namespace fw::native::pipeline {

class Overlaps {
 public:
  // The rows of a storage, as in `EngineOptions`.
  Overlaps(uint64_t row_bytes, uint64_t rows);

  // Adds a batch of at least a row behind those that were added, and says which of its rows wait.
  void add(const std::shared_ptr<Batch>& batch);

 private:
  // Who was the last to store and to load a unit: numbers of batches; 0: nobody.
  struct Entry {
    uint64_t unit = ~uint64_t(0);  // none
    uint64_t writer = 0;
    uint64_t writer_before = 0;
    uint64_t reader = 0;
  };
  struct Units {
    uint64_t first, last;
  };
  struct Sequence {
    Units units;
    bool writes;
    uint64_t number;
  };
  // What the rows of one batch come after: the last batches that load and store them.
  struct Met {
    uint64_t last[2] = {0, 0};
    std::vector<Sequence> sequences;  // in flight, of which it may come after some rows
    std::vector<RowSpan> rows;
  };

  Units units_of(uint64_t row) const;
  Units units_of(const Batch& sequence) const;
  bool in_flight(uint64_t number, bool writes) const;
  void forget_ended();
  void add_list(Batch& batch, Met& met);
  void add_rows(const Batch& batch, uint64_t begin, uint64_t end, Met& met);
  void meet_lists(const Batch& sequence, Met& met) const;
  bool meet(const Entry& entry, const Batch& batch, Met& met) const;
  void add_span(const Batch& sequence, Units units, Met& met) const;
  uint64_t slot_of(uint64_t unit) const;
  template <typename Table>
  auto& look_up(Table& table, uint64_t unit) const;
  void make_room(uint64_t units);

  const uint64_t row_bytes_, rows_;
  uint32_t unit_shift_ = 0;                       // 0: a row is a unit
  uint64_t count_ = 0;                            // of batches
  std::deque<std::shared_ptr<Batch>> flying_[2];  // of each direction, oldest first
  std::vector<Entry> table_;
  uint64_t used_ = 0;
};

}  // namespace fw::native::pipeline
