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
static_assert(sizeof(reduce_params) == 80);

// Reads `count` elements through `load` and adds their sum to `*sum`. A warp reads spans of
// consecutive elements, its lanes side by side; or every lane reads random elements.
template <typename Load>
FW_DEVICE void sum_elements(const reduce_params& p, uint64_t length, Load load) {
  uint64_t total = 0;
  if (p.random != 0) {
    for (uint64_t k = base::thread_index(); k < p.count; k += base::thread_count()) {
      total += load(mix64(k + p.seed) % length);
    }
  } else {
    for (uint64_t first = uint64_t(warp::index()) * p.span; first < p.count;
         first += uint64_t(warp::count()) * p.span) {
      const uint64_t end = first + p.span < p.count ? first + p.span : p.count;
      for (uint64_t i = first + warp::lane(); i < end; i += warp::kWarpWidth) total += load(i);
    }
  }
  atomic::add_relaxed(p.sum, total);
}

}  // namespace fw::kernels

FW_KERNEL_RESIDENT(8) fw_reduce_array(const FW_GRID_CONSTANT fw::kernels::reduce_params p) {
  fw::cursor<uint32_t> data(p.data);
  fw::kernels::sum_elements(p, p.data.length, [&](uint64_t i) { return data[i]; });
}
FW_KERNEL_RESIDENT(8) fw_reduce_plain(const FW_GRID_CONSTANT fw::kernels::reduce_params p) {
  fw::kernels::sum_elements(p, p.data.length, [&](uint64_t i) { return p.plain[i]; });
}
