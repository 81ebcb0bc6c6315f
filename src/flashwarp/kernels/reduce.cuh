// Sums over arrays: what a first kernel of a user looks like, and how hits are measured.
#pragma once

#include "flashwarp/array.cuh"
#include "queue.cuh"

namespace fw::kernels {

struct reduce_params {
  array<uint32_t> data;
  const uint32_t* plain;  // reduce_plain: the same elements in device memory
  uint64_t* sum;          // one word, added to
  uint64_t count;         // elements to read
  uint64_t span;          // consecutive: elements that one warp reads in a row
  uint64_t seed;
  uint32_t random;  // 1: random elements, 0: consecutive ones
  uint32_t reserved;
};
static_assert(sizeof(reduce_params) == 120);

// Elements that a lane has in flight when it reads consecutive ones.
inline constexpr uint32_t kReduceUnroll = 8;

// Adds `count` random elements through `load` to `*sum`.
template <typename Load>
FW_DEVICE void sum_random(const reduce_params& p, uint64_t length, Load load) {
  uint64_t total = 0;
  for (uint64_t k = base::thread_index(); k < p.count; k += base::thread_count()) {
    total += load(mix64(k + p.seed) % length);
  }
  atomic::add_relaxed(p.sum, total);
}

// Adds the elements below `count` to `*sum`. A warp reads spans of consecutive elements, its lanes
// side by side: `load_several` for whole rounds, `load` for what is left.
template <typename LoadSeveral, typename Load>
FW_DEVICE void sum_consecutive(const reduce_params& p, LoadSeveral load_several, Load load) {
  constexpr uint64_t kRound = uint64_t(kReduceUnroll) * warp::kWarpWidth;
  uint64_t total = 0;
  for (uint64_t first = uint64_t(warp::index()) * p.span; first < p.count;
       first += uint64_t(warp::count()) * p.span) {
    const uint64_t end = first + p.span < p.count ? first + p.span : p.count;
    uint64_t i = first + warp::lane();
    // Counted in one register: rounds that it cannot count go the way of what is left.
    for (uint32_t round = uint32_t((end - first) / kRound); round != 0; round--, i += kRound) {
      uint32_t values[kReduceUnroll];
      load_several(i, values);
      FW_UNROLL
      for (uint32_t k = 0; k < kReduceUnroll; k++) total += values[k];
    }
    for (; i < end; i += warp::kWarpWidth) total += load(i);
  }
  atomic::add_relaxed(p.sum, total);
}

}  // namespace fw::kernels

FW_KERNEL_RESIDENT(5) fw_reduce_array(const FW_GRID_CONSTANT fw::kernels::reduce_params p) {
  using namespace fw;
  if (p.random != 0) {
    kernels::sum_random(p, p.data.length, [&](uint64_t i) { return p.data[i]; });
    return;
  }
  cursor<uint32_t> data(p.data);
  kernels::sum_consecutive(
      p,
      [&](uint64_t i, uint32_t (&values)[kernels::kReduceUnroll]) {
        data.load(i, warp::kWarpWidth, values);
      },
      [&](uint64_t i) { return data[i]; });
}
FW_KERNEL_RESIDENT(8) fw_reduce_plain(const FW_GRID_CONSTANT fw::kernels::reduce_params p) {
  using namespace fw;
  if (p.random != 0) {
    kernels::sum_random(p, p.data.length, [&](uint64_t i) { return p.plain[i]; });
    return;
  }
  kernels::sum_consecutive(
      p,
      [&](uint64_t i, uint32_t (&values)[kernels::kReduceUnroll]) {
        FW_UNROLL
        for (uint32_t k = 0; k < kernels::kReduceUnroll; k++) {
          values[k] = p.plain[i + k * warp::kWarpWidth];
        }
      },
      [&](uint64_t i) { return p.plain[i]; });
}
