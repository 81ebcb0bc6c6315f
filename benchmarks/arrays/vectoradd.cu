// c = a + b: on arrays larger than memory, as in BaM's section 5.4, and on a tile in device memory.
#include "flashwarp/array.cuh"

namespace bench {

using namespace fw;

// Elements that a lane has in flight.
constexpr uint32_t kUnroll = 4;

// Adds `n` elements from `first` on, with all lanes, to memory of the warp's own.
FW_DEVICE void add_line(cursor<const double>& a, cursor<const double>& b, uint64_t first,
                        uint64_t n, double* sums) {
  constexpr uint64_t kRound = uint64_t(kUnroll) * warp::kWarpWidth;
  uint64_t i = warp::lane();
  for (; i - warp::lane() + kRound <= n; i += kRound) {
    double x[kUnroll], y[kUnroll];
    a.load(first + i, warp::kWarpWidth, x);
    b.load(first + i, warp::kWarpWidth, y);
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) sums[i + k * warp::kWarpWidth] = x[k] + y[k];
  }
  for (; i < n; i += warp::kWarpWidth) sums[i] = a[first + i] + b[first + i];
}

}  // namespace bench

// A warp takes `line` elements at a time, a line of each array. A line of `c` is stored whole, so
// it is not read first. With `eager`, its write-back begins at once, and other warps' reads go on
// meanwhile; without, whoever needs the frame begins it. `ahead` lines of `a` and `b` are on their
// way for each warp. `scratch` holds a line for each warp of the launch.
FW_KERNEL vector_add(const FW_GRID_CONSTANT fw::array<const double> a,
                     const FW_GRID_CONSTANT fw::array<const double> b,
                     const FW_GRID_CONSTANT fw::array<double> c, double* scratch, uint64_t line,
                     uint32_t ahead, uint32_t eager) {
  using namespace fw;
  const uint64_t stride = warp::count(), lines = (c.size() + line - 1) / line;
  double* sums = scratch + uint64_t(warp::index()) * line;
  cursor<const double> from_a(a), from_b(b);
  uint64_t asked = warp::index();
  for (uint64_t at = warp::index(); at < lines; at += stride) {
    for (; ahead != 0 && asked <= at + ahead * stride && asked < lines; asked += stride) {
      a.prefetch(asked * line);
      b.prefetch(asked * line);
    }
    const uint64_t first = at * line;
    const uint64_t n = c.size() - first < line ? c.size() - first : line;
    bench::add_line(from_a, from_b, first, n, sums);
    warp::sync(warp::kFullMask);
    warp::write(c, first, n, sums);
    if (eager != 0) c.write_back(first, n);
  }
}

// The same straight from and to pinned memory of the host, 16 bytes a lane: how far warps get that
// move every byte themselves and do nothing else.
FW_KERNEL add_in_place(uint64_t a, uint64_t b, uint64_t c, uint64_t pairs) {
  using namespace fw;
  using word = atomic::raw<16>;
  const uint64_t stride = base::thread_count();
  const char* from_a = reinterpret_cast<const char*>(a);
  const char* from_b = reinterpret_cast<const char*>(b);
  char* to = reinterpret_cast<char*>(c);
  union pair {
    atomic::word16 word;
    double values[2];
  };
  for (uint64_t first = base::thread_index(); first < pairs; first += bench::kUnroll * stride) {
    pair x[bench::kUnroll], y[bench::kUnroll];
    FW_UNROLL
    for (uint32_t k = 0; k < bench::kUnroll; k++) {
      const uint64_t at = first + k * stride < pairs ? first + k * stride : first;
      x[k].word = word::load_stream(from_a + 16 * at);
      y[k].word = word::load_stream(from_b + 16 * at);
    }
    FW_UNROLL
    for (uint32_t k = 0; k < bench::kUnroll; k++) {
      const uint64_t at = first + k * stride < pairs ? first + k * stride : first;
      x[k].values[0] += y[k].values[0];
      x[k].values[1] += y[k].values[1];
      word::store_plain(to + 16 * at, x[k].word);
    }
  }
}

// The kernel of the tiled baseline.
FW_KERNEL add_tile(const double* a, const double* b, double* c, uint64_t n) {
  using namespace fw;
  for (uint64_t i = base::thread_index(); i < n; i += base::thread_count()) c[i] = a[i] + b[i];
}
