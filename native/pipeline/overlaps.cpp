#include "pipeline/overlaps.h"

#include <algorithm>
#include <bit>

namespace fw::native::pipeline {
namespace {

constexpr uint64_t kBlockShift = 9;
// Looked up under the lock of a port, for whose end workers may wait.
constexpr uint64_t kRowsAtATime = 4096;
// A row's entry is fetched so many rows before it is looked up.
constexpr uint64_t kAhead = 8;

bool is_write(const Batch& batch) { return batch.port->options.is_write; }
bool is_sequence(const Batch& batch) { return batch.request.kind == batch::kSequence; }

// Sorts spans, and merges those that touch.
void merge(std::vector<RowSpan>& spans) {
  std::ranges::sort(spans, {}, &RowSpan::begin);
  size_t kept = 0;
  for (const RowSpan& each : spans) {
    if (kept != 0 && each.begin <= spans[kept - 1].end) {
      spans[kept - 1].end = std::max(spans[kept - 1].end, each.end);
    } else {
      spans[kept++] = each;
    }
  }
  spans.resize(kept);
}

}  // namespace

Overlaps::Overlaps(uint64_t row_bytes, uint64_t rows) : row_bytes_(row_bytes), rows_(rows) {
  const uint64_t block = 1 << kBlockShift;
  if (row_bytes % block == 0) return;
  unit_shift_ = uint32_t(std::bit_width(std::max(row_bytes, block) - 1));
}

Overlaps::Units Overlaps::units_of(uint64_t row) const {
  if (unit_shift_ == 0) return {row, row};
  const uint64_t begin = row * row_bytes_;
  return {begin >> unit_shift_, (begin + row_bytes_ - 1) >> unit_shift_};
}

Overlaps::Units Overlaps::units_of(const Batch& sequence) const {
  const uint64_t first = sequence.request.first;
  if (first >= rows_) return {~uint64_t(0), 0};  // none
  const uint64_t count = std::min(sequence.request.rows, rows_ - first);
  return {units_of(first).first, units_of(first + count - 1).last};
}

uint64_t Overlaps::slot_of(uint64_t unit) const {
  return unit * 0x9E3779B97F4A7C15u >> (64 - std::countr_zero(table_.size()));
}

// Returns the entry of a unit, or the one that it would take.
template <typename Table>
auto& Overlaps::look_up(Table& table, uint64_t unit) const {
  uint64_t slot = slot_of(unit);
  while (table[slot].unit != unit && table[slot].unit != Entry{}.unit) {
    slot = (slot + 1) & (table.size() - 1);
  }
  return table[slot];
}

bool Overlaps::in_flight(uint64_t number, bool writes) const {
  const auto& flying = flying_[writes];
  return !flying.empty() && number >= flying.front()->number;
}

void Overlaps::forget_ended() {
  for (auto& flying : flying_) {
    // Acquire: what it has moved comes before what follows it.
    while (!flying.empty() && flying.front()->ended.load(std::memory_order_acquire)) {
      flying.pop_front();
    }
  }
}

void Overlaps::add(const std::shared_ptr<Batch>& batch) {
  forget_ended();
  const bool writes = is_write(*batch);
  batch->number = ++count_;
  if (writes || !flying_[true].empty()) {
    Met nothing, met;
    for (const auto& each : flying_[false]) add_list(*each, nothing);
    for (const auto& flying : flying_) {
      for (const auto& each : flying) {
        if (!is_sequence(*each) || !(writes || is_write(*each))) continue;
        met.sequences.push_back({units_of(*each), is_write(*each), each->number});
      }
    }
    if (is_sequence(*batch)) {
      meet_lists(*batch, met);
    } else {
      add_list(*batch, met);
    }
    merge(met.rows);
    batch->waits = std::move(met.rows);
    for (const bool of_writes : {false, true}) {
      const auto last = std::ranges::find(flying_[of_writes], met.last[of_writes], &Batch::number);
      if (last != flying_[of_writes].end()) batch->before[of_writes] = *last;
    }
  }
  flying_[writes].push_back(batch);
}

void Overlaps::add_list(Batch& batch, Met& met) {
  if (batch.entered || is_sequence(batch)) return;
  batch.entered = true;
  const uint64_t rows = batch.request.rows;
  make_room(unit_shift_ == 0 ? rows : 2 * rows);
  for (uint64_t begin = 0; begin < rows; begin += kRowsAtATime) {
    // Its list may be read until its end, which takes this lock.
    const std::lock_guard guard(batch.port->lock);
    if (batch.ended.load(std::memory_order_relaxed)) return;
    add_rows(batch, begin, std::min(rows, begin + kRowsAtATime), met);
  }
}

void Overlaps::add_rows(const Batch& batch, uint64_t begin, uint64_t end, Met& met) {
  const batch::host_regions& regions = batch.port->options.regions;
  const int64_t* ids = regions.list(regions.slot(batch.request));
  const auto exists = [&](uint64_t row) { return row < end && uint64_t(ids[row]) < rows_; };
  for (uint64_t row = begin; row < end; ++row) {
    if (exists(row + kAhead)) {
      __builtin_prefetch(&table_[slot_of(units_of(uint64_t(ids[row + kAhead])).first)]);
    }
    if (!exists(row)) continue;
    const Units units = units_of(uint64_t(ids[row]));
    bool waits = false;
    for (uint64_t unit = units.first; unit <= units.last; ++unit) {
      Entry& entry = look_up(table_, unit);
      if (entry.unit != unit) {
        entry = {.unit = unit};
        ++used_;
      }
      waits |= meet(entry, batch, met);
      if (!is_write(batch)) {
        entry.reader = batch.number;
      } else if (entry.writer != batch.number) {
        entry.writer_before = entry.writer;
        entry.writer = batch.number;
      }
    }
    for (const Sequence& each : met.sequences) {
      if (units.first > each.units.last || units.last < each.units.first) continue;
      met.last[each.writes] = std::max(met.last[each.writes], each.number);
      waits = true;
    }
    if (waits) met.rows.push_back({row, row + 1});
  }
}

// Meets the rows of lists, and the other sequences.
void Overlaps::meet_lists(const Batch& sequence, Met& met) const {
  const Units units = units_of(sequence);
  for (const Sequence& each : met.sequences) {
    if (units.first > each.units.last || units.last < each.units.first) continue;
    met.last[each.writes] = std::max(met.last[each.writes], each.number);
    add_span(sequence, each.units, met);
  }
  const auto meet_unit = [&](const Entry& entry) {
    if (meet(entry, sequence, met)) add_span(sequence, {entry.unit, entry.unit}, met);
  };
  if (used_ == 0) return;
  if (units.last - units.first < table_.size()) {
    for (uint64_t unit = units.first; unit <= units.last; ++unit) {
      const Entry& entry = look_up(table_, unit);
      if (entry.unit == unit) meet_unit(entry);
    }
  } else {
    for (const Entry& entry : table_) {
      if (entry.unit >= units.first && entry.unit <= units.last) meet_unit(entry);
    }
  }
}

// Whether a batch comes after another one at a unit.
bool Overlaps::meet(const Entry& entry, const Batch& batch, Met& met) const {
  const uint64_t writer = entry.writer == batch.number ? entry.writer_before : entry.writer;
  const bool after_write = in_flight(writer, true);
  const bool after_read = is_write(batch) && in_flight(entry.reader, false);
  if (after_write) met.last[true] = std::max(met.last[true], writer);
  if (after_read) met.last[false] = std::max(met.last[false], entry.reader);
  return after_write || after_read;
}

// Adds the rows of a sequence that lie in units, in part or whole.
void Overlaps::add_span(const Batch& sequence, Units units, Met& met) const {
  uint64_t first = units.first, last = units.last;
  if (unit_shift_ != 0) {
    first = (first << unit_shift_) / row_bytes_;
    last = (((last + 1) << unit_shift_) - 1) / row_bytes_;
  }
  const uint64_t begin = sequence.request.first;
  first = std::max(first, begin);
  const uint64_t end = std::min(last + 1, begin + sequence.request.rows);
  if (first < end) met.rows.push_back({first - begin, end - begin});
}

// Makes room for more units. What has ended is forgotten then.
void Overlaps::make_room(uint64_t units) {
  if (4 * (used_ + units) <= 3 * table_.size()) return;
  std::vector<Entry> kept;
  for (const Entry& each : table_) {
    if (in_flight(each.writer, true) || in_flight(each.reader, false)) kept.push_back(each);
  }
  used_ = kept.size();
  table_.assign(std::bit_ceil(2 * (used_ + units)), Entry{});
  for (const Entry& each : kept) look_up(table_, each.unit) = each;
}

}  // namespace fw::native::pipeline
