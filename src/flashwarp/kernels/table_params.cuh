// What a lookup is asked for: tables, ids, and the runs of ids that groups of lanes take.
#pragma once

#include "flashwarp/array.cuh"
#include "flashwarp/base/number.cuh"
#include "flashwarp/cache/miss_list.cuh"

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
  uint64_t run;           // ids that a group takes, one after the other; without pooling, and not
                          // to look rows up: ids of a warp's item
  uint64_t warp_items;    // of each table
  uint64_t look_ahead;    // ids that a warp prefetches ahead; 0: none
  uint32_t table_count;
  uint32_t index_bytes;  // of ids, 4 or 8
  uint32_t offset_bytes;
  base::number weight_number;
  base::number out_number;
  kernels::pooling pooling;
  cache::list_use misses;  // where a launch that looks no rows up lists the ids whose rows miss
};
static_assert(sizeof(lookup_params) == 368);

// Words of a row that one lane takes. On the CPU a lane is a whole group.
inline constexpr uint32_t kLaneWords = 32 / warp::kWarpWidth;

FW_DEVICE int64_t integer_at(const void* integers, uint32_t bytes, uint64_t k) {
  return bytes == 4 ? int64_t(static_cast<const int32_t*>(integers)[k])
                    : static_cast<const int64_t*>(integers)[k];
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

}  // namespace fw::kernels
