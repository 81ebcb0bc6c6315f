// Lookups in tables: rows by their ids, converted, scaled and pooled on the way to the caller.
//
// A row has numbers of 4 to 32 bits, of which the first are its weights. A group of lanes, one for
// each word of a row, takes a run of ids: the ids of a bag, or ids whose rows go to the caller one
// by one. Each lane of a group finds the lines of one id, and the warp fetches all that are missing
// with one bundle of commands. Then the group takes the rows in the order of their ids, a few at a
// time. Rows that are longer than a group are divided into tiles.
//
// Rows that need no conversion keep their bits. Whole rows of one table that need none go through
// the kernels of rows.cuh.
//
// A sum cannot be taken back. So a word is added only after the second look at its tag: what has
// failed that is loaded again, through an access that retries. Sums are made in float32, in the
// order of the ids.
#pragma once

#include "builds.cuh"
#include "table_rows.cuh"

namespace fw::kernels {

// Rows of which a lane has its words in flight.
inline constexpr uint32_t kRowsHeld = warp::kWarpWidth > 1 ? 4 : 1;

// The words that a lane holds of some rows. The row that it takes next is the first.
struct held_words {
  atomic::word16 of[kRowsHeld][kLaneWords];

  FW_DEVICE void move_up() {
    FW_UNROLL
    for (uint32_t r = 1; r < kRowsHeld; r++) {
      FW_UNROLL
      for (uint32_t c = 0; c < kLaneWords; c++) of[r - 1][c] = of[r][c];
    }
  }
};

// The rows of a group's next ids, one for each lane.
struct group_rows {
  found_row mine;
  uint64_t from;  // the first byte of the lane's tile in the array
  // Addresses of the tile, as if all of it were in its first line, or all in its second.
  uint64_t one, two;
  lanes present;  // those that have a row
};

// One of the rows, for all lanes of its group.
struct group_row {
  uint64_t number;  // among the ids
  uint32_t source;  // the lane that knows it
  bool inside;      // whether the run has it
  bool has;         // whether it counts
};

// A run of ids, which a group of lanes looks up: finds the rows, loads their words, and converts
// them, to pool or to store each.
template <base::number kNumber, bool kPools>
class run_lookup {
 public:
  FW_DEVICE run_lookup(const lookup_params& p, const lookup_table& t, const lookup_run& run)
      : p_(p), t_(t), run_(run) {}

  FW_DEVICE void look_up(uint64_t table, lookup_events& events) {
    for (uint64_t first = run_.begin; here_.any(first < run_.end); first += t_.lanes) {
      if constexpr (kLooksAhead) {
        if (run_.tile_begin == 0 && events.quiet < p_.look_ahead) {
          base::opaque (&look_ahead<kPools>)(p_, t_, table, first, events);
        }
      }
      const group_rows rows = find(first, events);
      // Each lane has acquired its own lines; now the lanes of its group load from all of them.
      here_.sync();
      for (uint32_t q = 0; q < t_.lanes; q += kRowsHeld) {
        if (!here_.any(first + q < run_.end)) break;
        held_words words;
        load(rows, q, words);
        // The loads of the frames come before the second look at their tags.
        atomic::fence_acquire();
        here_.sync();
        const lanes good = here_.ballot(still_usable(t_, rows.mine));
        // Not unrolled, because there is much code for a row: the rows move up instead.
        for (uint32_t r = 0; r < kRowsHeld; r++, words.move_up()) {
          const group_row row = row_at(rows, first, q + r);
          const bool again = row.has && !good.has(row.source);
          if (here_.any(again)) load_again(rows, row, again, words.of[0]);
          take(rows, row, words.of[0]);
        }
      }
    }
    if constexpr (kPools) store_bag();
  }

 private:
  static constexpr uint32_t kBits = base::bits_in(kNumber);
  // Words of numbers of 4 bits have up to 8 bytes.
  static constexpr uint32_t kCount = kBits < 8 ? 16 : 128 / kBits;

  // The lane in its group. Computed anew each time, which costs less than a register.
  FW_DEVICE uint32_t sub() const { return warp::lane() & (t_.lanes - 1); }
  FW_DEVICE uint32_t offset_of(uint32_t c) const { return (sub() + c * t_.lanes) * t_.word_bytes; }
  FW_DEVICE uint64_t column_of(uint32_t offset) const {
    return tile_column_ + numbers_in<kNumber>(offset);
  }
  // How many numbers of the word at `column` are weights.
  FW_DEVICE uint32_t used_at(uint64_t column) const {
    const uint64_t rest = t_.dim - column;
    return rest < word_count_ ? uint32_t(rest) : word_count_;
  }

  FW_DEVICE group_rows find(uint64_t first, lookup_events& events) {
    group_rows rows;
    found_row& mine = rows.mine;
    mine = find_row<kPools>(p_, t_, run_, first + sub(), events);
    if (scaled_) mine.scale = scale_of_row(t_.scales, here_, mine.wants, mine.row - t_.row_begin);
    rows.from = mine.row * t_.row_bytes + run_.tile_begin;
    const uint64_t inside = rows.from & (cache::line_bytes(t_.geometry) - 1);
    rows.one = rows.two = 0;
    if (mine.usable) {
      const cache::geometry& g = t_.geometry;
      rows.one = reinterpret_cast<uint64_t>(cache::frame_of(g, mine.first.way)) + inside;
      rows.two = reinterpret_cast<uint64_t>(cache::frame_of(g, mine.second.way)) - mine.split;
    }
    rows.present = here_.ballot(mine.wants);
    return rows;
  }

  // The lane that knows the `q`-th row. Past the last lane of a group its last one again, which
  // costs less than a condition.
  FW_DEVICE uint32_t source_of(uint32_t q) const {
    return warp::lane() - sub() + (q < t_.lanes ? q : t_.lanes - 1);
  }

  // Loads the lane's words of the rows from the `q`-th on.
  FW_DEVICE void load(const group_rows& rows, uint32_t q, held_words& words) {
    FW_UNROLL
    for (uint32_t r = 0; r < kRowsHeld; r++) {
      const uint32_t source = source_of(q + r);
      const uint64_t low = here_.take(rows.one, source);
      uint64_t high = low;
      uint64_t split = ~uint64_t(0);
      if (t_.straddles != 0) {
        high = here_.take(rows.two, source);
        split = here_.take(rows.mine.split, source);
      }
      for (uint32_t c = 0; c < kLaneWords; c++) {
        const uint32_t offset = offset_of(c);
        words.of[r][c] = {0, 0, 0, 0};
        if (low != 0 && offset < run_.tile_bytes) {
          const uint64_t at = (offset < split ? low : high) + offset;
          words.of[r][c] = load_frame(reinterpret_cast<const char*>(at), t_.word_bytes);
        }
      }
    }
  }

  FW_DEVICE group_row row_at(const group_rows& rows, uint64_t first, uint32_t q) const {
    const uint64_t number = first + q;
    const uint32_t source = source_of(q);
    const bool inside = q < t_.lanes && number < run_.end;
    return {number, source, inside, inside && rows.present.has(source)};
  }

  // Loads the words of a row that did not stay in its frames.
  FW_DEVICE void load_again(const group_rows& rows, const group_row& row, bool again,
                            atomic::word16 (&words)[kLaneWords]) {
    const uint64_t begin = here_.take(rows.from, row.source);
    for (uint32_t c = 0; c < kLaneWords; c++) {
      const uint32_t offset = offset_of(c);
      const bool wants = again && offset < run_.tile_bytes;
      bool failed;
      const atomic::word16 loaded = base::opaque(&load_missing)(
          t_.geometry, *t_.cache, *t_.volume, here_, wants,
          place_of(t_.geometry, *t_.volume, begin + offset, t_.word_bytes), failed);
      if (wants) words[c] = loaded;
    }
  }

  // Adds the lane's words of a row to the bag, or stores them.
  FW_DEVICE void take(const group_rows& rows, const group_row& row,
                      const atomic::word16 (&words)[kLaneWords]) {
    const float weight = here_.take(rows.mine.weight, row.source);
    const float row_scale = here_.take(rows.mine.scale, row.source);
    const uint64_t array_row = blocks_ ? here_.take(rows.mine.row, row.source) : 0;
    for (uint32_t c = 0; c < kLaneWords; c++) {
      const uint32_t offset = offset_of(c);
      const uint64_t column = column_of(offset);
      const bool covers = row.inside && offset < run_.tile_bytes && column < t_.dim;
      const float scale =
          blocks_ ? scale_of_block(array_row, column, covers && row.has) : row_scale;
      if (!covers) continue;
      if constexpr (kPools) {
        if (row.has) add(c, convert(words[c], row.has, scale), weight);
      } else {
        store(row, column, words[c], scale);
      }
    }
    if (row.has) rows_++;
  }

  // The scale of the block of a column, for each lane that `wants`.
  FW_DEVICE float scale_of_block(uint64_t row, uint64_t column, bool wants) {
    const table_scales& s = t_.scales;
    const uint64_t at = ((row - t_.row_begin) >> s.row_shift) * s.stride + column / s.columns;
    float scale = 1.0f;
    if (s.volume == nullptr) {
      if (wants) scale = number_at(s.memory, s.number, at);
    } else {
      scale = base::opaque(&scale_in_array)(s, here_, wants, at);
    }
    return s.divides != 0 ? scale / s.whole : scale;
  }

  FW_DEVICE lane_values<kCount> convert(const atomic::word16& word, bool has, float scale) const {
    lane_values<kCount> values;
    FW_UNROLL
    for (uint32_t i = 0; i < kCount; i++) {
      values.numbers[i] = has ? number_in<kNumber>(word, i) : 0.0f;
      if (scaled_ && has) values.numbers[i] = values.numbers[i] * scale * whole_;
    }
    return values;
  }

  FW_DEVICE void add(uint32_t c, const lane_values<kCount>& values, float weight) {
    float (&sums)[kCount] = sums_[c];
    FW_UNROLL
    for (uint32_t i = 0; i < kCount; i++) {
      const float value = values.numbers[i];
      if (p_.pooling == pooling::kMax) {
        if (rows_ == 0 || value > sums[i]) sums[i] = value;
      } else {
        sums[i] += p_.weights != nullptr ? value * weight : value;
      }
    }
  }

  FW_DEVICE void store(const group_row& row, uint64_t column, const atomic::word16& word,
                       float scale) {
    const uint32_t used = used_at(column);
    char* const to = out_ + ((row.number - run_.begin) * p_.out_stride + column) * out_bytes_;
    if constexpr (kBits > 8) {
      if (keeps_bits_) return store_bits(to, word, used * (kBits / 8));
    }
    store_numbers(to, p_.out_number, convert(word, row.has, scale).numbers, used);
  }

  FW_DEVICE void store_bag() {
    for (uint32_t c = 0; c < kLaneWords; c++) {
      const uint32_t offset = offset_of(c);
      const uint64_t column = column_of(offset);
      if (offset >= run_.tile_bytes || column >= t_.dim) continue;
      float (&sums)[kCount] = sums_[c];
      if (p_.pooling == pooling::kMean && rows_ != 0) {
        FW_UNROLL
        for (uint32_t i = 0; i < kCount; i++) sums[i] /= float(rows_);
      }
      store_numbers(out_ + column * out_bytes_, p_.out_number, sums, used_at(column));
    }
  }

  const lookup_params& p_;
  const lookup_table& t_;
  const lookup_run run_;
  const lanes here_ = lanes::all();
  const uint64_t tile_column_ = numbers_in<kNumber>(run_.tile_begin);
  // Without branches, which would make each flag a byte that is spilled.
  const bool scaled_ = (t_.scales.volume != nullptr) | (t_.scales.memory != nullptr);
  const bool blocks_ = scaled_ & (t_.scales.stride > 1);
  const uint32_t word_count_ = numbers_in<kNumber>(t_.word_bytes);
  const float whole_ = t_.scales.divides != 0 ? 1.0f : t_.scales.whole;
  const uint32_t out_bytes_ = base::bytes_of(p_.out_number);
  char* const out_ = p_.out + (run_.out_row * p_.out_stride + t_.out_column) * out_bytes_;
  const bool keeps_bits_ = !kPools & !scaled_ & (p_.out_number == kNumber);
  // Of a bag: the sums of the lane's words, and how many rows it has had.
  float sums_[kLaneWords][kCount] = {};
  uint64_t rows_ = 0;
};

// Looks up one run for each group of the warp: the `warp_item`-th of a table.
template <base::number kNumber, bool kPools>
FW_DEVICE void look_up(const lookup_params& p, const lookup_table& t, uint64_t table,
                       uint64_t warp_item, lookup_events& events) {
  const uint32_t groups = warp::kWarpWidth / t.lanes;
  const uint64_t item = warp_item * groups + warp::lane() / t.lanes;
  run_lookup<kNumber, kPools>(p, t, run_at<kPools>(p, t, table, item)).look_up(table, events);
}

template <bool kPools>
FW_DEVICE void look_up_any(const lookup_params& p, const lookup_table& t, uint64_t table,
                           uint64_t warp_item, lookup_events& events) {
  switch (t.number) {
    case base::number::kFloat32:
      return look_up<base::number::kFloat32, kPools>(p, t, table, warp_item, events);
    case base::number::kFloat16:
      return look_up<base::number::kFloat16, kPools>(p, t, table, warp_item, events);
    case base::number::kBfloat16:
      return look_up<base::number::kBfloat16, kPools>(p, t, table, warp_item, events);
    case base::number::kFloat8E4m3:
      return look_up<base::number::kFloat8E4m3, kPools>(p, t, table, warp_item, events);
    case base::number::kFloat8E5m2:
      return look_up<base::number::kFloat8E5m2, kPools>(p, t, table, warp_item, events);
    case base::number::kInt8:
      return look_up<base::number::kInt8, kPools>(p, t, table, warp_item, events);
    case base::number::kFloat4E2m1:
      return look_up<base::number::kFloat4E2m1, kPools>(p, t, table, warp_item, events);
    case base::number::kFloat8E8m0:
      return;  // of scales alone
  }
}

// Serves the warp's items, of one table after the other.
template <bool kPools>
FW_DEVICE void for_each_lookup(const lookup_params& p) {
  const lanes here = lanes::all();
  const warp::share mine = warp::share_of(p.table_count * p.warp_items, 1);
  const lookup_table* current = nullptr;
  lookup_events events;
  for (uint64_t i = mine.begin; i < mine.end; i += mine.stride) {
    const uint64_t table = p.tables == nullptr ? 0 : i / p.warp_items;
    const lookup_table& t = p.tables == nullptr ? p.table : p.tables[table];
    if (&t != current) {
      if (current != nullptr) add_lookup_events(*current->volume, events);
      current = &t;
      cache::refresh(*t.cache, *t.volume, here);
      if (t.scales.volume != nullptr) cache::refresh(*t.scales.cache, *t.scales.volume, here);
    }
    const uint64_t item = i - table * p.warp_items;
    look_up_any<kPools>(p, t, table, item, events);
  }
  if (current != nullptr) add_lookup_events(*current->volume, events);
}

}  // namespace fw::kernels

#if FW_BUILDS(look_up_rows)
FW_KERNEL_RESIDENT(2) fw_look_up_rows(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::for_each_lookup<false>(p);
}
#endif
#if FW_BUILDS(look_up_bags)
FW_KERNEL_RESIDENT(2) fw_look_up_bags(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::for_each_lookup<true>(p);
}
#endif
