// Lookups in tables: rows by their ids, converted, scaled and pooled on the way to the caller.
//
// A row has numbers of 4 to 32 bits, of which the first are its weights. A group of lanes, one for
// each word of a row, takes a run of ids: the ids of a bag, or ids whose rows go to the caller one
// by one. Each lane of a group finds the lines of one id, and the warp fetches all that are missing
// with one batch of commands. Then the group takes the rows in the order of their ids, a few at a
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
#include "flashwarp/array.cuh"
#include "flashwarp/base/number.cuh"
#include "rows.cuh"

namespace fw::kernels {

// What becomes of the rows of a bag. The host has the same values.
enum class pooling : uint32_t { kNone = 0, kSum = 1, kMean = 2, kMax = 3 };

// The numbers that the weights of a table are multiplied by: those of blocks, and one of the table.
// A weight is its number times the scale of its block, times `whole`; or, if `whole` divides, times
// the quotient of scale and `whole`. Both orders exist, and their results differ in the last bit.
struct table_scales {
  cache::geometry geometry;  // if they lie in an array: its cache and volume
  cache::line_cache* cache;
  cache::volume* volume;  // null: in memory
  const void* memory;     // null, too: there are none
  uint64_t stride;        // of a row of blocks; 0: one scale for the table
  uint32_t columns;       // how many weights of a row have one scale
  base::number number;
  uint32_t row_shift;  // 2^row_shift rows have the same scales
  uint32_t divides;
  float whole;
  uint32_t reserved;
};
static_assert(sizeof(table_scales) == 96);

// One table: rows of an array. It does not change, so tables of a group lie in device memory.
struct lookup_table {
  cache::geometry geometry;  // the array's
  cache::line_cache* cache;
  cache::volume* volume;
  uint64_t row_bytes;
  uint64_t row_begin;   // the table's first row in the array
  uint64_t row_count;   // of the table
  uint64_t padding;     // the id that is no part of any bag; row_count or more: none
  uint64_t out_column;  // where its weights begin in a row of the output, in numbers
  table_scales scales;
  base::number number;
  uint32_t dim;         // weights of a row
  uint32_t word_bytes;  // that a lane loads at a time, 1 to 16; a divisor of row_bytes
  uint32_t words;       // of a row that have weights
  uint32_t lanes;       // of a group; a power of two
  uint32_t straddles;   // 0: no tile of a row lies in two lines
};
static_assert(sizeof(lookup_table) == 216);

struct lookup_params {
  lookup_table table;          // if there is one
  const lookup_table* tables;  // of a group, in device memory; or null
  const void* ids;             // int64 or int32, of one table after the other
  const void* offsets;         // of the first id of each bag; null: all bags have `bag_ids`
  const void* weights;         // a factor for each id; or null
  char* out;
  uint64_t id_count;      // of all tables
  uint64_t bags;          // of each table; without pooling: its ids
  uint64_t bag_ids;       // without offsets, ids of a bag; without pooling 1
  uint64_t offset_count;  // the last bag ends at id_count unless there is one offset more
  uint64_t out_stride;    // from one row of the output to the next, in numbers
  uint64_t run;           // without pooling: ids that a group takes, one after the other
  uint64_t warp_items;    // of each table
  uint64_t look_ahead;    // ids that a warp prefetches ahead; 0: none
  uint32_t table_count;
  uint32_t index_bytes;  // of ids, 4 or 8
  uint32_t offset_bytes;
  base::number weight_number;
  base::number out_number;
  kernels::pooling pooling;
};
static_assert(sizeof(lookup_params) == 344);

// Words of a row that one lane takes. On the CPU a lane is a whole group.
inline constexpr uint32_t kLaneWords = 32 / warp::kWarpWidth;

// Rows of which a lane has its words in flight.
inline constexpr uint32_t kRowsHeld = warp::kWarpWidth > 1 ? 4 : 1;

FW_DEVICE int64_t integer_at(const void* integers, uint32_t bytes, uint64_t k) {
  return bytes == 4 ? int64_t(static_cast<const int32_t*>(integers)[k])
                    : static_cast<const int64_t*>(integers)[k];
}

FW_DEVICE_NOINLINE float byte_number(base::number kind, uint32_t bits) {
  return kind == base::number::kFloat8E4m3 ? base::to_float<base::number::kFloat8E4m3>(bits)
                                           : base::to_float<base::number::kFloat8E8m0>(bits);
}

// Of scales and factors; those that the host lets through.
FW_DEVICE float number_at(const void* numbers, base::number kind, uint64_t k) {
  if (kind == base::number::kFloat32) return static_cast<const float*>(numbers)[k];
  if (base::bytes_of(kind) == 1) {
    return base::opaque(&byte_number)(kind, static_cast<const uint8_t*>(numbers)[k]);
  }
  const uint32_t bits = static_cast<const uint16_t*>(numbers)[k];
  return kind == base::number::kFloat16 ? base::to_float<base::number::kFloat16>(bits)
                                        : base::to_float<base::number::kBfloat16>(bits);
}

// Loads a word of up to 16 bytes from a frame. What follows it in the result is zero.
FW_DEVICE_NOINLINE atomic::word16 load_narrow(const char* from, uint32_t bytes) {
  atomic::word16 word = {0, 0, 0, 0};
  if (bytes == 8) {
    const uint64_t value = atomic::raw<8>::load(from);
    word.x = uint32_t(value);
    word.y = uint32_t(value >> 32);
  } else if (bytes == 4) {
    word.x = atomic::raw<4>::load(from);
  } else {
    word.x = bytes == 2 ? atomic::raw<2>::load(from) : atomic::raw<1>::load(from);
  }
  return word;
}
FW_DEVICE atomic::word16 load_frame(const char* from, uint32_t bytes) {
  if (bytes == 16) return atomic::raw<16>::load(from);
  return base::opaque(&load_narrow)(from, bytes);
}

// An operation of `cache::access` that loads one word of each lane.
struct load_table_word {
  static constexpr bool kStores = false;
  uint64_t offset;
  uint32_t bytes;
  atomic::word16 value;

  FW_DEVICE void visit(lanes, lanes members, uint64_t frame) {
    if (members.mine()) {
      value = load_frame(reinterpret_cast<const char*>(frame) + offset, bytes);
    }
  }
};

// A word of an array that a lane wants.
struct word_place {
  uint64_t line;  // global
  uint64_t offset;
  uint32_t bytes;
};

// Loads one word for each lane that `wants`, however long that takes. Zeros if it cannot be read:
// the error is in the volume's record. `failed` says so.
FW_DEVICE_NOINLINE atomic::word16 load_missing(const cache::geometry& g, cache::line_cache& c,
                                               cache::volume& v, lanes here, bool wants,
                                               word_place at, bool& failed) {
  load_table_word op = {at.offset, at.bytes, {0, 0, 0, 0}};
  cache::tally count;
  const uint32_t status = cache::access<policy>(g, c, v, here, wants, at.line, false, op, count);
  count.add_to(v, here);
  failed = wants && status != nvme::kSuccess;
  return wants && !failed ? op.value : atomic::word16{0, 0, 0, 0};
}

FW_DEVICE word_place place_of(const cache::geometry& g, const cache::volume& v, uint64_t byte,
                              uint32_t bytes) {
  return {v.line_begin + (byte >> g.line_shift), byte & (cache::line_bytes(g) - 1), bytes};
}

// The `k`-th scale of a table whose scales lie in an array, for each lane that `wants`.
FW_DEVICE_NOINLINE float scale_in_array(const table_scales& s, lanes here, bool wants, uint64_t k) {
  const uint32_t bytes = base::bytes_of(s.number);
  bool failed;
  const atomic::word16 word =
      load_missing(s.geometry, *s.cache, *s.volume, here, wants,
                   place_of(s.geometry, *s.volume, k * bytes, bytes), failed);
  return number_at(&word.x, s.number, 0);
}

// The `i`-th number of a word. `i` is a constant after unrolling.
template <base::number kNumber>
FW_DEVICE float number_in(const atomic::word16& word, uint32_t i) {
  constexpr uint32_t kPerPart = 32 / base::bits_in(kNumber);
  const uint32_t part = i / kPerPart;
  const uint32_t bits = part == 0 ? word.x : part == 1 ? word.y : part == 2 ? word.z : word.w;
  return base::to_float<kNumber>(bits >> (i % kPerPart * base::bits_in(kNumber)));
}

// Numbers in so many bytes of a row.
template <base::number kNumber>
FW_DEVICE uint32_t numbers_in(uint32_t bytes) {
  return bytes * 8 / base::bits_in(kNumber);
}

// The bits of a value as a number of the output.
FW_DEVICE uint32_t bits_as(base::number kind, float value) {
  if (kind == base::number::kFloat32) return base::bits_of(value);
  return kind == base::number::kFloat16 ? base::float16_of(value) : base::bfloat16_of(value);
}

// Values that a lane stores; a copy of them may be in memory.
template <uint32_t kCount>
struct lane_values {
  float numbers[kCount];
};

// Stores the first `count` of the values as numbers of the output, one after the other.
template <uint32_t kCount>
FW_DEVICE_NOINLINE void store_each(char* to, base::number kind, const lane_values<kCount>& values,
                                   uint32_t count) {
  const bool wide = kind == base::number::kFloat32;
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t bits = bits_as(kind, values.numbers[i]);
    if (wide) {
      atomic::raw<4>::store_plain(to + i * 4, bits);
    } else {
      atomic::raw<2>::store_plain(to + i * 2, uint16_t(bits));
    }
  }
}

// Stores the first `count` of the values as numbers of the output.
template <uint32_t kCount>
FW_DEVICE void store_numbers(char* to, base::number kind, const float (&values)[kCount],
                             uint32_t count) {
  const uint64_t address = reinterpret_cast<uint64_t>(to);
  if (count != kCount || address % 16 != 0) {
    lane_values<kCount> copy;
    FW_UNROLL
    for (uint32_t i = 0; i < kCount; i++) copy.numbers[i] = values[i];
    base::opaque (&store_each<kCount>)(to, kind, copy, count);
    return;
  }
  if (kind == base::number::kFloat32) {
    FW_UNROLL
    for (uint32_t i = 0; i < kCount; i += 4) {
      atomic::raw<16>::store_plain(to + i * 4,
                                   {base::bits_of(values[i]), base::bits_of(values[i + 1]),
                                    base::bits_of(values[i + 2]), base::bits_of(values[i + 3])});
    }
    return;
  }
  FW_UNROLL
  for (uint32_t i = 0; i < kCount; i += 4) {
    const uint32_t low = bits_as(kind, values[i]) | bits_as(kind, values[i + 1]) << 16;
    const uint32_t high = bits_as(kind, values[i + 2]) | bits_as(kind, values[i + 3]) << 16;
    atomic::raw<8>::store_plain(to + i * 2, uint64_t(high) << 32 | low);
  }
}

// Stores the first `bytes` of a word to an address that is not aligned to it.
FW_DEVICE_NOINLINE void store_halves(char* to, atomic::word16 word, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 2) {
    const uint32_t part = i < 4 ? word.x : i < 8 ? word.y : i < 12 ? word.z : word.w;
    atomic::raw<2>::store_plain(to + i, uint16_t(part >> i % 4 * 8));
  }
}

// Stores the first `bytes` of a word, numbers of two bytes or four, as they are.
FW_DEVICE void store_bits(char* to, const atomic::word16& word, uint32_t bytes) {
  if (bytes == 16 && reinterpret_cast<uint64_t>(to) % 16 == 0) {
    atomic::raw<16>::store_plain(to, word);
  } else {
    base::opaque (&store_halves)(to, word, bytes);
  }
}

// A group's run of ids in one tile of their rows.
struct lookup_run {
  uint64_t begin, end;  // among the ids
  uint64_t out_row;     // of the first id; or of the bag
  uint64_t tile_begin;  // bytes of a row before the tile
  uint32_t tile_bytes;  // 0: the group has nothing to do
};

// Notes an id that is out of bounds, or an offset that no bag can have, for the host to raise.
FW_DEVICE_NOINLINE void note_id(const lookup_table& t, uint64_t id) {
  cache::volume& v = *t.volume;
  cache::note_failure(v.indices, v.errors->indices, id, cache::kRows, 0, t.row_count);
}
FW_DEVICE_NOINLINE void note_offset(cache::volume& v, uint64_t offset) {
  cache::note_failure(v.indices, v.errors->indices, offset, cache::kOffsets, 0);
}

// The `item`-th run of a table.
template <bool kPools>
FW_DEVICE lookup_run run_at(const lookup_params& p, const lookup_table& t, uint64_t table,
                            uint64_t item) {
  const uint32_t whole = t.lanes * kLaneWords * t.word_bytes;
  const uint32_t bytes = t.words * t.word_bytes;
  const uint32_t tiles = (bytes + whole - 1) / whole;
  const uint64_t number = tiles == 1 ? item : item / tiles;
  const uint32_t tile_begin = uint32_t(item - number * tiles) * whole;
  const uint32_t rest = bytes - tile_begin;
  lookup_run r = {0, 0, number, tile_begin, rest < whole ? rest : whole};
  if constexpr (kPools) {
    if (number >= p.bags) return {0, 0, 0, 0, 0};
    const uint64_t bag = table * p.bags + number;
    if (p.offsets == nullptr) {
      r.begin = bag * p.bag_ids;
      r.end = r.begin + p.bag_ids;
      return r;
    }
    const bool last = bag + 1 >= p.offset_count;
    r.begin = uint64_t(integer_at(p.offsets, p.offset_bytes, bag));
    r.end = last ? p.id_count : uint64_t(integer_at(p.offsets, p.offset_bytes, bag + 1));
    // Ids before the first bag would be in none.
    const bool late = bag == 0 && r.begin != 0;
    if (late || r.begin > r.end || r.end > p.id_count) {
      if (tile_begin == 0 && (warp::lane() & (t.lanes - 1)) == 0)
        note_offset(*t.volume, late || r.begin > p.id_count ? r.begin : r.end);
      r.begin = r.end = 0;
    }
  } else {
    r.out_row = number * p.run;
    if (r.out_row >= p.bags) return {0, 0, 0, 0, 0};
    const uint64_t after = p.bags - r.out_row;
    r.begin = table * p.bags + r.out_row;
    r.end = r.begin + (after < p.run ? after : p.run);
  }
  return r;
}

// What a warp counts of a table's volume beside the events of its misses.
struct lookup_events {
  uint32_t hits = 0;        // the same in each lane
  uint64_t bytes_used = 0;  // the lane's own
  // Of a thread that looks ahead: how far it has, for how many ids nothing was missing since, and
  // the lines that it fetched. An access finds each of them, but the launch caused a miss for it.
  uint64_t looked_to = 0;
  uint64_t quiet = 0;
  uint32_t fetched = 0;
};
FW_DEVICE void add_lookup_events(cache::volume& v, lookup_events& events) {
  cache::counters& shard = cache::shard_of(v);
  if (kLooksAhead && events.fetched != 0) {
    // Some of the accesses that found them have counted themselves.
    const uint64_t hits = atomic::load_relaxed(&shard.hits) + events.hits;
    const uint64_t fetched = events.fetched < hits ? events.fetched : hits;
    atomic::add_relaxed(&shard.hits, uint64_t(0) - fetched);
  }
  if (events.bytes_used != 0) atomic::add_relaxed(&shard.bytes_used, events.bytes_used);
  if (warp::lane() == 0 && events.hits != 0) {
    atomic::add_relaxed(&shard.hits, uint64_t(events.hits));
  }
  events = lookup_events();
}

// What a lane knows of one id, for all lanes of its group.
struct found_row {
  uint64_t row;    // of the array
  bool wants;      // whether it has a row that counts
  bool usable;     // whether all lines of the tile are resident
  uint64_t split;  // bytes of the tile in its first line
  cache::place first, second;
  float weight;
  float scale;  // of the whole row
};

// Looks for the lines of the tile of one id for each lane, and fetches those that are missing.
template <bool kPools>
FW_DEVICE found_row find_row(const lookup_params& p, const lookup_table& t, const lookup_run& run,
                             uint64_t k, lookup_events& events) {
  cache::volume& v = *t.volume;
  const cache::geometry& g = t.geometry;
  const lanes here = lanes::all();
  found_row f = {0, false, false, 0, {0, 0, false}, {0, 0, false}, 1.0f, 1.0f};
  const bool mine = k < run.end;
  const uint64_t id = mine ? uint64_t(integer_at(p.ids, p.index_bytes, k)) : 0;
  const bool stray = mine && id >= t.row_count;
  if (stray && run.tile_begin == 0) note_id(t, id);
  f.row = t.row_begin + id;
  f.wants = mine && !stray && !(kPools && id == t.padding);
  if (kPools && p.weights != nullptr && mine) f.weight = number_at(p.weights, p.weight_number, k);

  const uint64_t from = f.row * t.row_bytes + run.tile_begin;
  const uint64_t line = v.line_begin + (from >> g.line_shift);
  f.split = cache::line_bytes(g) - (from & (cache::line_bytes(g) - 1));
  const bool two = t.straddles != 0 && f.wants && f.split < run.tile_bytes;
  if (f.wants) f.first = cache::probe(g, line);
  if (two) f.second = cache::probe(g, line + 1);
  // A fill is no hit: policies tell lines that are used again from those that are not.
  const bool hit_first = f.first.found;
  const bool hit_second = f.second.found;
  uint32_t hits = here.ballot(f.first.found).count();
  if (t.straddles != 0) hits += here.ballot(f.second.found).count();
  events.hits += hits;
  bool failed = false;
  if (here.any(f.wants && !f.first.found)) {
    if constexpr (kLooksAhead) events.quiet = 0;
    const word_place at = {line, 0, t.word_bytes};
    base::opaque (&load_missing)(g, *t.cache, v, here, f.wants && !f.first.found, at, failed);
    if (f.wants && !f.first.found) f.first = cache::probe(g, line);
  }
  if (t.straddles != 0 && here.any(two && !f.second.found)) {
    const word_place at = {line + 1, 0, t.word_bytes};
    bool lost = false;
    base::opaque (&load_missing)(g, *t.cache, v, here, two && !f.second.found, at, lost);
    failed = failed || lost;
    if (two && !f.second.found) f.second = cache::probe(g, line + 1);
  }
  f.wants = f.wants && !failed;
  f.usable = f.wants && f.first.found && (!two || f.second.found);
  if (f.usable && hit_first) policy::on_hit(g, f.first.way, f.first.word);
  if (f.usable && hit_second) policy::on_hit(g, f.second.way, f.second.word);
  if (f.wants) events.bytes_used += run.tile_bytes;
  return f;
}

// The scale of each lane's own row; of tables with several for a row, their first, so that all of
// them are in the cache.
FW_DEVICE float scale_of_row(const table_scales& s, lanes here, bool wants, uint64_t row) {
  float scale = 1.0f;
  const uint64_t at = (row >> s.row_shift) * s.stride;
  if (s.volume != nullptr) {
    scale = base::opaque(&scale_in_array)(s, here, wants, at);
  } else if (wants) {
    scale = number_at(s.memory, s.number, at);
  }
  return s.divides != 0 ? scale / s.whole : scale;
}

// Whether the lane's loads of a frame since `find_row` saw the data of its lines.
FW_DEVICE bool still_usable(const lookup_table& t, const found_row& f) {
  if (!f.usable || !cache::still_holds(t.geometry, f.first.way, f.first.word)) return false;
  return !f.second.found || cache::still_holds(t.geometry, f.second.way, f.second.word);
}

// The state of a group's bag, of which each lane has its words' numbers.
template <uint32_t kCount>
struct pool {
  float sums[kLaneWords][kCount] = {};
  uint64_t rows = 0;
};

// Makes the next of the rows that a lane holds the first.
FW_DEVICE void move_up(atomic::word16 (&words)[kRowsHeld][kLaneWords]) {
  FW_UNROLL
  for (uint32_t r = 1; r < kRowsHeld; r++) {
    FW_UNROLL
    for (uint32_t c = 0; c < kLaneWords; c++) words[r - 1][c] = words[r][c];
  }
}

// The ids of a table: from `begin` on, below `end`.
FW_DEVICE lookup_run ids_of(const lookup_params& p, uint64_t table) {
  if (p.offsets == nullptr) {
    const uint64_t count = p.bags * p.bag_ids;
    return {table * count, (table + 1) * count, 0, 0, 0};
  }
  const uint64_t first = table * p.bags;
  const uint64_t after = first + p.bags;
  const bool last = after >= p.offset_count;
  const uint64_t begin = uint64_t(integer_at(p.offsets, p.offset_bytes, first));
  const uint64_t end = last ? p.id_count : uint64_t(integer_at(p.offsets, p.offset_bytes, after));
  return {begin, end < p.id_count ? end : p.id_count, 0, 0, 0};
}

// Starts the fills of what a thread of the CPU device reads from the `k`-th id on, as long as the
// storage makes it wait.
template <bool kPools>
FW_DEVICE_NOINLINE void look_ahead(const lookup_params& p, const lookup_table& t, uint64_t table,
                                   uint64_t k, lookup_events& events) {
  const lanes here = lanes::all();
  const uint64_t end = ids_of(p, table).end;
  const uint64_t to = k + p.look_ahead < end ? k + p.look_ahead : end;
  const uint32_t shift = t.geometry.line_shift;
  const table_scales& s = t.scales;
  cache::tally rows;
  cache::tally scales;
  events.quiet++;
  bool waits = true;
  uint64_t next = events.looked_to > k ? events.looked_to : k;
  for (; next < to && waits; next++) {
    const uint64_t id = uint64_t(integer_at(p.ids, p.index_bytes, next));
    if (id >= t.row_count || (kPools && id == t.padding)) continue;
    const uint64_t from = (t.row_begin + id) * t.row_bytes;
    const uint64_t last = (from + t.words * t.word_bytes - 1) >> shift;
    for (uint64_t at = from >> shift; at <= last; at++) {
      const uint64_t line = t.volume->line_begin + at;
      const uint32_t misses = rows.misses;
      cache::prefetch<policy>(*t.cache, *t.volume, here, true, line, rows);
      // What is there at once need not be asked for ahead, where it may be evicted before its use.
      if (rows.misses != misses && cache::probe(t.geometry, line).found) waits = false;
    }
    if (s.volume == nullptr) continue;
    const uint64_t scale = (id >> s.row_shift) * s.stride;
    const word_place at =
        place_of(s.geometry, *s.volume, scale * base::bytes_of(s.number), base::bytes_of(s.number));
    cache::prefetch<policy>(*s.cache, *s.volume, here, true, at.line, scales);
  }
  // If the storage is fast, ask again after as many ids as a look ahead has.
  events.looked_to = waits ? next : next + p.look_ahead;
  if (rows.misses != 0 || scales.misses != 0) events.quiet = 0;
  events.fetched += rows.misses;
  // A prefetch counts no hits.
  rows.add_to(*t.volume, here);
  if (s.volume != nullptr) scales.add_to(*s.volume, here);
}

// Looks up one run for each group of the warp: the `warp_item`-th of a table.
template <base::number kNumber, bool kPools>
FW_DEVICE void look_up(const lookup_params& p, const lookup_table& t, uint64_t table,
                       uint64_t warp_item, lookup_events& events) {
  constexpr uint32_t kBits = base::bits_in(kNumber);
  // Words of numbers of 4 bits have up to 8 bytes.
  constexpr uint32_t kCount = kBits < 8 ? 16 : 128 / kBits;
  const lanes here = lanes::all();
  const uint32_t groups = warp::kWarpWidth / t.lanes;
  const uint32_t sub = warp::lane() & (t.lanes - 1);
  const uint32_t leader = warp::lane() - sub;
  const uint64_t item = warp_item * groups + warp::lane() / t.lanes;
  const lookup_run run = run_at<kPools>(p, t, table, item);
  const uint64_t tile_column = numbers_in<kNumber>(run.tile_begin);
  const bool scaled = t.scales.volume != nullptr || t.scales.memory != nullptr;
  const bool blocks = scaled && t.scales.stride > 1;
  const uint32_t word_count = numbers_in<kNumber>(t.word_bytes);
  const float whole = t.scales.divides != 0 ? 1.0f : t.scales.whole;
  const uint32_t out_bytes = base::bytes_of(p.out_number);
  char* const out = p.out + (run.out_row * p.out_stride + t.out_column) * out_bytes;
  const bool keeps_bits = !kPools && !scaled && p.out_number == kNumber;
  pool<kCount> bag;

  for (uint64_t first = run.begin; here.any(first < run.end); first += t.lanes) {
    if constexpr (kLooksAhead) {
      if (run.tile_begin == 0 && events.quiet < p.look_ahead) {
        base::opaque (&look_ahead<kPools>)(p, t, table, first, events);
      }
    }
    found_row mine = find_row<kPools>(p, t, run, first + sub, events);
    if (scaled) mine.scale = scale_of_row(t.scales, here, mine.wants, mine.row - t.row_begin);
    const uint64_t from = mine.row * t.row_bytes + run.tile_begin;
    const uint64_t inside = from & (cache::line_bytes(t.geometry) - 1);
    // Addresses of the tile, as if all of it were in its first line, or all in its second.
    uint64_t one = 0;
    uint64_t two = 0;
    if (mine.usable) {
      one = reinterpret_cast<uint64_t>(cache::frame_of(t.geometry, mine.first.way)) + inside;
      two = reinterpret_cast<uint64_t>(cache::frame_of(t.geometry, mine.second.way)) - mine.split;
    }
    const lanes present = here.ballot(mine.wants);
    // Each lane has acquired its own lines; now the lanes of its group load from all of them.
    here.sync();
    for (uint32_t q = 0; q < t.lanes; q += kRowsHeld) {
      if (!here.any(first + q < run.end)) break;
      atomic::word16 words[kRowsHeld][kLaneWords];
      FW_UNROLL
      for (uint32_t r = 0; r < kRowsHeld; r++) {
        // Past the last lane of a group its last one again, which costs less than a condition.
        const uint32_t source = leader + (q + r < t.lanes ? q + r : t.lanes - 1);
        const uint64_t low = here.take(one, source);
        uint64_t high = low;
        uint64_t split = ~uint64_t(0);
        if (t.straddles != 0) {
          high = here.take(two, source);
          split = here.take(mine.split, source);
        }
        for (uint32_t c = 0; c < kLaneWords; c++) {
          const uint32_t offset = (sub + c * t.lanes) * t.word_bytes;
          words[r][c] = {0, 0, 0, 0};
          if (low != 0 && offset < run.tile_bytes) {
            const uint64_t at = (offset < split ? low : high) + offset;
            words[r][c] = load_frame(reinterpret_cast<const char*>(at), t.word_bytes);
          }
        }
      }
      // The loads of the frames come before the second look at their tags.
      atomic::fence_acquire();
      here.sync();
      const lanes good = here.ballot(still_usable(t, mine));
      // Not unrolled, because there is much code for a row: the rows move up instead.
      for (uint32_t r = 0; r < kRowsHeld; r++, move_up(words)) {
        const bool any_row = q + r < t.lanes;
        const uint64_t k = first + q + r;
        const uint32_t source = leader + (any_row ? q + r : t.lanes - 1);
        const bool inside_run = any_row && k < run.end;
        const bool has = inside_run && present.has(source);
        const bool again = has && !good.has(source);
        if (here.any(again)) {
          const uint64_t begin = here.take(from, source);
          for (uint32_t c = 0; c < kLaneWords; c++) {
            const uint32_t offset = (sub + c * t.lanes) * t.word_bytes;
            const bool wants = again && offset < run.tile_bytes;
            bool failed;
            const atomic::word16 loaded = base::opaque(&load_missing)(
                t.geometry, *t.cache, *t.volume, here, wants,
                place_of(t.geometry, *t.volume, begin + offset, t.word_bytes), failed);
            if (wants) words[0][c] = loaded;
          }
        }
        const float weight = here.take(mine.weight, source);
        const float row_scale = here.take(mine.scale, source);
        const uint64_t row = blocks ? here.take(mine.row, source) : 0;
        for (uint32_t c = 0; c < kLaneWords; c++) {
          const uint32_t offset = (sub + c * t.lanes) * t.word_bytes;
          const uint64_t column = tile_column + numbers_in<kNumber>(offset);
          const bool covers = inside_run && offset < run.tile_bytes && column < t.dim;
          float scale = row_scale;
          if (blocks) {
            const uint64_t at = ((row - t.row_begin) >> t.scales.row_shift) * t.scales.stride +
                                column / t.scales.columns;
            if (t.scales.volume == nullptr) {
              if (covers && has) scale = number_at(t.scales.memory, t.scales.number, at);
            } else {
              scale = base::opaque(&scale_in_array)(t.scales, here, covers && has, at);
            }
            if (t.scales.divides != 0) scale /= t.scales.whole;
          }
          if (!covers) continue;
          const uint64_t rest = t.dim - column;
          const uint32_t used = rest < word_count ? uint32_t(rest) : word_count;
          char* const to = out + ((k - run.begin) * p.out_stride + column) * out_bytes;
          if constexpr (!kPools && kBits > 8) {
            if (keeps_bits) {
              store_bits(to, words[0][c], used * (kBits / 8));
              continue;
            }
          }
          float values[kCount];
          FW_UNROLL
          for (uint32_t i = 0; i < kCount; i++) {
            values[i] = has ? number_in<kNumber>(words[0][c], i) : 0.0f;
            if (scaled && has) values[i] = values[i] * scale * whole;
          }
          if constexpr (kPools) {
            if (!has) continue;
            float (&sums)[kCount] = bag.sums[c];
            FW_UNROLL
            for (uint32_t i = 0; i < kCount; i++) {
              if (p.pooling == pooling::kMax) {
                if (bag.rows == 0 || values[i] > sums[i]) sums[i] = values[i];
              } else {
                sums[i] += p.weights != nullptr ? values[i] * weight : values[i];
              }
            }
          } else {
            store_numbers(to, p.out_number, values, used);
          }
        }
        if (has) bag.rows++;
      }
    }
  }
  if constexpr (kPools) {
    for (uint32_t c = 0; c < kLaneWords; c++) {
      const uint32_t offset = (sub + c * t.lanes) * t.word_bytes;
      const uint64_t column = tile_column + numbers_in<kNumber>(offset);
      if (offset >= run.tile_bytes || column >= t.dim) continue;
      float (&sums)[kCount] = bag.sums[c];
      if (p.pooling == pooling::kMean && bag.rows != 0) {
        FW_UNROLL
        for (uint32_t i = 0; i < kCount; i++) sums[i] /= float(bag.rows);
      }
      const uint64_t rest = t.dim - column;
      store_numbers(out + column * out_bytes, p.out_number, sums,
                    rest < word_count ? uint32_t(rest) : word_count);
    }
  }
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

// Starts the fills of the rows of one id for each lane.
FW_DEVICE void prefetch_rows_of(const lookup_params& p, const lookup_table& t, uint64_t table,
                                uint64_t warp_item) {
  const lanes here = lanes::all();
  cache::tally tally;
  const lookup_run ids = ids_of(p, table);
  const uint64_t k = ids.begin + warp_item * warp::kWarpWidth + warp::lane();
  const bool mine = k >= ids.begin && k < ids.end;
  const uint64_t id = mine ? uint64_t(integer_at(p.ids, p.index_bytes, k)) : t.row_count;
  const bool wants = mine && id < t.row_count;
  if (mine && !wants) note_id(t, id);
  const uint32_t shift = t.geometry.line_shift;
  const uint64_t from = (t.row_begin + id) * t.row_bytes;
  const uint64_t last = (from + t.words * t.word_bytes - 1) >> shift;
  for (uint64_t line = from >> shift; here.any(wants && line <= last); line++) {
    base::opaque (&cache::prefetch<policy>)(*t.cache, *t.volume, here, wants&& line <= last,
                                            t.volume->line_begin + line, tally);
  }
  tally.add_to(*t.volume, here);
}

// What a launch does with the rows of its ids.
enum class lookup_action { kRows, kBags, kPrefetch };

// Serves the warp's items, of one table after the other.
template <lookup_action kAction>
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
    if constexpr (kAction == lookup_action::kPrefetch) {
      prefetch_rows_of(p, t, table, item);
    } else {
      look_up_any<kAction == lookup_action::kBags>(p, t, table, item, events);
    }
  }
  if (current != nullptr) add_lookup_events(*current->volume, events);
}

}  // namespace fw::kernels

#if FW_BUILDS(look_up_rows)
FW_KERNEL_RESIDENT(2) fw_look_up_rows(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::for_each_lookup<fw::kernels::lookup_action::kRows>(p);
}
#endif
#if FW_BUILDS(look_up_bags)
FW_KERNEL_RESIDENT(2) fw_look_up_bags(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::for_each_lookup<fw::kernels::lookup_action::kBags>(p);
}
#endif
#if FW_BUILDS(prefetch_ids)
FW_KERNEL_RESIDENT(4) fw_prefetch_ids(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::for_each_lookup<fw::kernels::lookup_action::kPrefetch>(p);
}
#endif
