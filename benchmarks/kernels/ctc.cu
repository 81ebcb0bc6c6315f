// Blocks of the kernel's own, loaded and computed with: AGILE's section 4.2. With `ahead` the next
// blocks are on their way while a thread computes with the one it has.
#include "flashwarp/array.cuh"

namespace bench {

using namespace fw;

// A chain of dependent steps (the generator of Numerical Recipes), which no compiler shortens.
FW_DEVICE uint32_t compute(uint32_t x, uint32_t steps) {
  for (uint32_t k = 0; k < steps; k++) x = x * 1664525u + 1013904223u;
  return x;
}

}  // namespace bench

// `threads` threads take `blocks` blocks of `words` words each. The threads of a block compute when
// all of them have loaded, and load when all have computed, as kernels do that share what they
// load.
FW_KERNEL_WIDE load_and_compute(const FW_GRID_CONSTANT fw::array<const uint32_t> data,
                                uint32_t* sums, uint64_t threads, uint32_t blocks, uint32_t words,
                                uint32_t steps, uint32_t ahead) {
  using namespace fw;
  const uint64_t rounds = (threads + base::thread_count() - 1) / base::thread_count();
  for (uint64_t round = 0; round < rounds; round++) {
    const uint64_t t = round * base::thread_count() + base::thread_index();
    const bool mine = t < threads;
    const uint64_t first = t * blocks;
    uint32_t sum = 0;
    uint32_t asked = 0;
    for (uint32_t k = 0; k < blocks; k++) {
      for (; ahead != 0 && asked <= k + ahead && asked < blocks; asked++) {
        if (mine) data.prefetch((first + asked) * words);
      }
      const uint32_t loaded = mine ? data[(first + k) * words + k] : 0;
      block::sync();
      sum += bench::compute(loaded, steps);
      block::sync();
    }
    if (mine) sums[t] = sum;
  }
}

// The computation alone.
FW_KERNEL_WIDE compute_only(uint32_t* sums, uint64_t threads, uint32_t blocks, uint32_t steps) {
  using namespace fw;
  for (uint64_t t = base::thread_index(); t < threads; t += base::thread_count()) {
    uint32_t sum = 0;
    for (uint32_t k = 0; k < blocks; k++) sum += bench::compute(uint32_t(t) + k, steps);
    sums[t] = sum;
  }
}
