// Three kernels through an fw::array and on plain memory, the same text for both: what the library
// costs in registers, as AGILE's Figure 12 counts it. Compiled, never run.
#include "flashwarp/graph.cuh"

namespace bench {

using namespace fw;

// The mean of each row of `columns` elements, a warp a row.
template <typename Load>
FW_DEVICE void mean_of_rows(uint64_t rows, uint64_t columns, Load load, float* means) {
  for (uint64_t row = warp::index(); row < rows; row += warp::count()) {
    float sum = 0;
    for (uint64_t k = warp::lane(); k < columns; k += warp::kWarpWidth) {
      sum += load(row * columns + k);
    }
    sum = graph::sum_of_lanes(sum);
    if (warp::lane() == 0) means[row] = sum / float(columns);
  }
}

// One level of breadth-first search, a warp a vertex.
template <typename Load>
FW_DEVICE void search_level(const uint64_t* offsets, uint64_t vertices, uint32_t level, Load load,
                            uint32_t* distances, uint32_t* found) {
  bool met = false;
  for (uint64_t v = warp::index(); v < vertices; v += warp::count()) {
    if (atomic::load_relaxed(&distances[v]) != level) continue;
    const uint64_t end = offsets[v + 1];
    for (uint64_t i = offsets[v] + warp::lane(); i < end; i += warp::kWarpWidth) {
      const uint32_t other = load(i);
      if (atomic::load_relaxed(&distances[other]) != 0xffffffffu) continue;
      atomic::store_relaxed(&distances[other], level + 1);
      met = true;
    }
  }
  if (met) atomic::store_relaxed(found, 1u);
}

// y = A x for a matrix in compressed sparse rows, a warp a row.
template <typename Column, typename Value>
FW_DEVICE void multiply(const uint64_t* offsets, uint64_t rows, Column column, Value value,
                        const float* x, float* y) {
  for (uint64_t row = warp::index(); row < rows; row += warp::count()) {
    float sum = 0;
    const uint64_t end = offsets[row + 1];
    for (uint64_t i = offsets[row] + warp::lane(); i < end; i += warp::kWarpWidth) {
      sum += value(i) * x[column(i)];
    }
    sum = graph::sum_of_lanes(sum);
    if (warp::lane() == 0) y[row] = sum;
  }
}

}  // namespace bench

// FW_BENCH_RESIDENT blocks of 256 threads fit on a multiprocessor: a bound for the registers of the
// kernel and of what it calls on a miss.
#define FW_BENCH_KERNEL FW_KERNEL_RESIDENT(FW_BENCH_RESIDENT)

// By element: `a[i]`. By line: a cursor, which remembers the line of the last load.

FW_BENCH_KERNEL
mean_plain(const float* a, uint64_t rows, uint64_t columns, float* means) {
  bench::mean_of_rows(rows, columns, [&](uint64_t i) { return a[i]; }, means);
}
FW_BENCH_KERNEL
mean_by_element(const FW_GRID_CONSTANT fw::array<const float> a, uint64_t rows, uint64_t columns,
                float* means) {
  bench::mean_of_rows(rows, columns, [&](uint64_t i) { return a[i]; }, means);
}
FW_BENCH_KERNEL
mean_by_line(const FW_GRID_CONSTANT fw::array<const float> a, uint64_t rows, uint64_t columns,
             float* means) {
  fw::cursor<const float> line(a);
  bench::mean_of_rows(rows, columns, [&](uint64_t i) { return line[i]; }, means);
}

FW_BENCH_KERNEL
bfs_plain(const uint32_t* neighbours, const uint64_t* offsets, uint64_t vertices, uint32_t level,
          uint32_t* distances, uint32_t* found) {
  bench::search_level(
      offsets, vertices, level, [&](uint64_t i) { return neighbours[i]; }, distances, found);
}
FW_BENCH_KERNEL
bfs_by_element(const FW_GRID_CONSTANT fw::array<const uint32_t> neighbours, const uint64_t* offsets,
               uint64_t vertices, uint32_t level, uint32_t* distances, uint32_t* found) {
  bench::search_level(
      offsets, vertices, level, [&](uint64_t i) { return neighbours[i]; }, distances, found);
}
FW_BENCH_KERNEL
bfs_by_line(const FW_GRID_CONSTANT fw::array<const uint32_t> neighbours, const uint64_t* offsets,
            uint64_t vertices, uint32_t level, uint32_t* distances, uint32_t* found) {
  fw::cursor<const uint32_t> line(neighbours);
  bench::search_level(
      offsets, vertices, level, [&](uint64_t i) { return line[i]; }, distances, found);
}

FW_BENCH_KERNEL
spmv_plain(const uint32_t* columns, const float* values, const uint64_t* offsets, uint64_t rows,
           const float* x, float* y) {
  bench::multiply(
      offsets, rows, [&](uint64_t i) { return columns[i]; }, [&](uint64_t i) { return values[i]; },
      x, y);
}
FW_BENCH_KERNEL
spmv_by_element(const FW_GRID_CONSTANT fw::array<const uint32_t> columns,
                const FW_GRID_CONSTANT fw::array<const float> values, const uint64_t* offsets,
                uint64_t rows, const float* x, float* y) {
  bench::multiply(
      offsets, rows, [&](uint64_t i) { return columns[i]; }, [&](uint64_t i) { return values[i]; },
      x, y);
}
FW_BENCH_KERNEL
spmv_by_line(const FW_GRID_CONSTANT fw::array<const uint32_t> columns,
             const FW_GRID_CONSTANT fw::array<const float> values, const uint64_t* offsets,
             uint64_t rows, const float* x, float* y) {
  fw::cursor<const uint32_t> column(columns);
  fw::cursor<const float> value(values);
  bench::multiply(
      offsets, rows, [&](uint64_t i) { return column[i]; }, [&](uint64_t i) { return value[i]; }, x,
      y);
}
