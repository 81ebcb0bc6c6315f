// Blocks of one's own, loaded and computed with: AGILE's section 4.2. With `ahead` the next blocks
// are on their way while a thread computes with the one it has.
#include "flashwarp/array.cuh"

namespace bench {

using namespace fw;

// A chain of dependent steps (the generator of Numerical Recipes), which no compiler shortens.
FW_DEVICE uint32_t compute(uint32_t x, uint32_t steps) {
  for (uint32_t k = 0; k < steps; k++) x = x * 1664525u + 1013904223u;
  return x;
}

}  // namespace bench

// `threads` threads take `blocks` blocks of `words` words each.
FW_KERNEL load_and_compute(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint32_t* sums,
                           uint64_t threads, uint32_t blocks, uint32_t words, uint32_t steps,
                           uint32_t ahead) {
  using namespace fw;
  for (uint64_t t = base::thread_index(); t < threads; t += base::thread_count()) {
    const uint64_t first = t * blocks;
    uint32_t sum = 0;
    uint32_t asked = 0;
    for (uint32_t k = 0; k < blocks; k++) {
      for (; ahead != 0 && asked <= k + ahead && asked < blocks; asked++) {
        data.prefetch((first + asked) * words);
      }
      sum += bench::compute(data[(first + k) * words + k], steps);
    }
    sums[t] = sum;
  }
}

// The computation alone.
FW_KERNEL compute_only(uint32_t* sums, uint64_t threads, uint32_t blocks, uint32_t steps) {
  using namespace fw;
  for (uint64_t t = base::thread_index(); t < threads; t += base::thread_count()) {
    uint32_t sum = 0;
    for (uint32_t k = 0; k < blocks; k++) sum += bench::compute(uint32_t(t) + k, steps);
    sums[t] = sum;
  }
}
