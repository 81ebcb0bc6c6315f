// Rows by kernels alone, and batches that a kernel starts.
#include "../bench.cuh"
#include "flashwarp/batch.cuh"

using namespace fw;

// What warps alone can do with rows in place: the ceiling of batches that are pulled.
FW_KERNEL pull_rows(uint64_t source, const int64_t* ids, uint64_t target, uint64_t words,
                    uint32_t shift) {
  bench::copy_rows(source, ids, target, words, shift);
}

// Prefetches batches of `rows` rows, two in flight, to two buffers in turn.
FW_KERNEL stream_batches(fw::pipeline<const int32_t> p, const int64_t* ids, uint64_t rows,
                         uint64_t batches, int32_t* buffers, uint64_t words, int64_t* failed) {
  uint64_t lost = 0;
  for (uint64_t b = 0; b <= batches; b++) {
    if (b < batches) p.prefetch(ids + b * rows, rows, buffers + b % 2 * rows * words);
    if (b != 0) lost += p.prefetch_wait();
  }
  if (base::thread_index() == 0) failed[0] = int64_t(lost);
}
