// A filter on one column, sums over others: only lines with a selected row are read of the others.
//
// The selecting column is scanned by tiles. In a tile, first every line that the selected rows need
// of the dependent columns is asked for, then the rows are summed. A missing value (NaN) is counted
// out of its own column only, along with the row's key, so that ratios compare the same rows.
#include "flashwarp/array.cuh"

namespace demo {

using namespace fw;

inline constexpr uint32_t kQueryColumns = 5;

// Sums in double: exact for whole numbers below 2^53 in any order.
struct query_sums {
  uint64_t rows;                  // selected
  double key;                     // sum of the selecting column over them
  uint64_t known[kQueryColumns];  // selected rows whose value is not missing
  double value[kQueryColumns];    // sum of the values
  double key_of[kQueryColumns];   // sum of the selecting column over the same rows
};
static_assert(sizeof(query_sums) == 136);

struct query_params {
  array<float> key;                     // selects the rows with key >= minimum
  array<float> columns[kQueryColumns];  // same length; the first `column_count` count
  query_sums* sums;                     // added to
  float minimum;
  uint32_t column_count;
  uint32_t tile;  // rows that a warp takes at a time
  uint32_t reserved;
};
static_assert(sizeof(query_params) == 456);

// Adds to a double that many threads add to. Bounded by the other adders: one of them succeeds in
// each round.
FW_DEVICE void add_double(double* target, double value) {
  uint64_t* word = reinterpret_cast<uint64_t*>(target);
  uint64_t old = atomic::load_relaxed(word);
  while (true) {
    const double sum = detail::bit_cast<double>(old) + value;
    if (atomic::cas_acq_rel(word, old, detail::bit_cast<uint64_t>(sum))) return;
    old = atomic::load_relaxed(word);
  }
}

// A lane's own sums to everybody's.
FW_DEVICE void publish(const query_params& p, const query_sums& mine) {
  if (mine.rows == 0) return;
  atomic::add_relaxed(&p.sums->rows, mine.rows);
  add_double(&p.sums->key, mine.key);
  for (uint32_t c = 0; c < p.column_count; ++c) {
    atomic::add_relaxed(&p.sums->known[c], mine.known[c]);
    add_double(&p.sums->value[c], mine.value[c]);
    add_double(&p.sums->key_of[c], mine.key_of[c]);
  }
}

FW_DEVICE void add_row(const query_params& p, uint64_t row, float key, query_sums& mine) {
  mine.rows += 1;
  mine.key += key;
  for (uint32_t c = 0; c < p.column_count; ++c) {
    const float value = p.columns[c][row];
    // Only NaN differs from itself.
    if (value != value) continue;
    mine.known[c] += 1;
    mine.value[c] += value;
    mine.key_of[c] += key;
  }
}

// Asks for the tile's part of the selecting column, one line a lane.
FW_DEVICE void prefetch_keys(const query_params& p, uint64_t first) {
  const uint64_t span = cache::line_bytes(p.key.geometry) / sizeof(float);
  const uint64_t end = first + p.tile < p.key.size() ? first + p.tile : p.key.size();
  for (uint64_t i = first + warp::lane() * span; i < end; i += warp::kWarpWidth * span) {
    p.key.prefetch(i);
  }
}

}  // namespace demo

FW_KERNEL_RESIDENT(4) query_sums(const FW_GRID_CONSTANT demo::query_params p) {
  using namespace fw;
  const uint64_t stride = uint64_t(warp::count()) * p.tile;
  cursor<float> keys(p.key);
  demo::query_sums mine = {};
  for (uint64_t first = uint64_t(warp::index()) * p.tile; first < p.key.size(); first += stride) {
    demo::prefetch_keys(p, first + stride);
    const uint64_t end = first + p.tile < p.key.size() ? first + p.tile : p.key.size();
    for (uint64_t row = first + warp::lane(); row < end; row += warp::kWarpWidth) {
      if (!(keys[row] >= p.minimum)) continue;
      for (uint32_t c = 0; c < p.column_count; ++c) p.columns[c].prefetch(row);
    }
    for (uint64_t row = first + warp::lane(); row < end; row += warp::kWarpWidth) {
      const float key = keys[row];
      if (key >= p.minimum) demo::add_row(p, row, key, mine);
    }
  }
  demo::publish(p, mine);
}
