// Rows by kernels alone, and batches that a kernel starts.
#include "flashwarp/array.cuh"
#include "flashwarp/batch.cuh"

using namespace fw;

// What warps alone can do with rows in place: the ceiling of batches that are pulled.
//
// Copies rows of 2^shift words of 16 bytes from `source` to `target`, in the order of `ids`. A lane
// has eight words on their way.
FW_KERNEL pull_rows(uint64_t source, const int64_t* ids, uint64_t target, uint64_t words,
                    uint32_t shift) {
  using word = atomic::raw<16>;
  constexpr uint32_t kUnroll = 8;
  const uint64_t stride = base::thread_count(), mask = (uint64_t(1) << shift) - 1;
  const char* from = reinterpret_cast<const char*>(source);
  char* to = reinterpret_cast<char*>(target);
  for (uint64_t first = base::thread_index(); first < words; first += kUnroll * stride) {
    atomic::word16 held[kUnroll];
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) {
      const uint64_t at = first + k * stride < words ? first + k * stride : first;
      const uint64_t row = uint64_t(ids[at >> shift]);
      held[k] = word::load_stream(from + 16 * (row << shift | (at & mask)));
    }
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) {
      const uint64_t at = first + k * stride < words ? first + k * stride : first;
      word::store_plain(to + 16 * at, held[k]);
    }
  }
}

// Prefetches batches of `rows` rows, two in flight, to two buffers in turn.
FW_KERNEL stream_batches(fw::pipeline<const int32_t> p, const int64_t* ids, uint64_t rows,
                         uint64_t batches, int32_t* buffers, uint64_t words, int64_t* failed) {
  uint64_t lost = 0;
  for (uint64_t b = 0; b <= batches; b++) {
    if (b < batches) p.prefetch(ids + b * rows, rows, buffers + b % 2 * rows * words);
    if (b != 0) lost += p.prefetch_synchronize();
  }
  if (base::thread_index() == 0) failed[0] = int64_t(lost);
}
