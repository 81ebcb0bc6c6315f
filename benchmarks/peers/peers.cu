// Rows and elements in the memory of several GPUs: what warps reach by plain pointers.
#include "../bench.cuh"

using namespace fw;

FW_KERNEL plain_rows(uint64_t source, const int64_t* ids, uint64_t target, uint64_t words,
                     uint32_t shift) {
  bench::copy_rows(source, ids, target, words, shift);
}

// Where in the cache each line of the array has its set, as a part of 2^32 of all sets.
FW_KERNEL homes(const FW_GRID_CONSTANT array<const uint32_t> data, uint32_t* places,
                uint64_t lines) {
  for (uint64_t k = base::thread_index(); k < lines; k += base::thread_count()) {
    const uint64_t line = data.line_of(k << (data.geometry.line_shift - 2));
    places[k] = uint32_t((cache::set_of(data.geometry, line) << 32) / data.geometry.set_count);
  }
}

FW_KERNEL elements_array(const FW_GRID_CONSTANT array<const uint32_t> data, uint64_t count,
                         uint64_t seed, uint64_t* sum) {
  bench::sum_random(data.size(), count, seed, sum, [&](uint64_t i) { return data[i]; });
}

FW_KERNEL elements_plain(uint64_t address, uint64_t length, uint64_t count, uint64_t seed,
                         uint64_t* sum) {
  const uint32_t* data = reinterpret_cast<const uint32_t*>(address);
  bench::sum_random(length, count, seed, sum, [&](uint64_t i) { return data[i]; });
}
