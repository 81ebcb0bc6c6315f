// Random blocks of one line, read by as few warps as you like: waiting for each, or with the next
// ones on their way.
#include "../bench.cuh"

namespace {

// The data counts its elements, so a block's first word tells which block it is.
FW_DEVICE void check(const uint32_t* block, uint64_t first, uint64_t words, uint64_t& wrong) {
  if (block[0] != uint32_t(first) || block[words - 1] != uint32_t(first + words - 1)) wrong++;
}

}  // namespace

// Each warp reads one block at a time and waits for it.
FW_KERNEL_RESIDENT(4)
read_and_wait(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint32_t* buffers,
              uint64_t words, uint64_t blocks, uint64_t reads, uint64_t seed, uint64_t* wrong) {
  uint32_t* mine = buffers + fw::warp::index() * words;
  uint64_t errors = 0;
  for (uint64_t k = fw::warp::index(); k < reads; k += fw::warp::count()) {
    const uint64_t first = bench::mix64(k + seed) % blocks * words;
    fw::warp::read(data, first, words, mine);
    fw::warp::sync(fw::warp::kFullMask);
    if (fw::warp::lane() == 0) check(mine, first, words, errors);
  }
  if (errors != 0) fw::atomic::add(wrong, errors);
}

// Each lane has a block of its own, and the one after it on its way.
FW_KERNEL_RESIDENT(4)
read_ahead(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint32_t* buffers, uint64_t words,
           uint64_t blocks, uint64_t reads, uint64_t seed, uint64_t* wrong) {
  const uint64_t step = fw::base::thread_count();
  uint32_t* mine = buffers + fw::base::thread_index() * words;
  uint64_t errors = 0;
  uint64_t k = fw::base::thread_index();
  fw::token next;
  if (k < reads) next = data.read_async(bench::mix64(k + seed) % blocks * words, words, mine);
  for (; k < reads; k += step) {
    const uint64_t first = bench::mix64(k + seed) % blocks * words;
    fw::token now = next;
    // Into the same buffer: a token's elements move when it is waited for.
    if (k + step < reads) {
      next = data.read_async(bench::mix64(k + step + seed) % blocks * words, words, mine);
    }
    now.wait();
    check(mine, first, words, errors);
  }
  if (errors != 0) fw::atomic::add(wrong, errors);
}
