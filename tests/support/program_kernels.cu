// Users' kernels, as tests compile them for the CPU device and for GPUs: one for each kind of
// parameter.
#include "flashwarp/array.cuh"

struct pair {
  int32_t key;
  double value;
};
#if !defined(BIAS)
#define BIAS 0
#endif

FW_KERNEL gather(fw::array<float> x, const uint64_t* indices, float* out, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    out[i] = x[indices[i]] + BIAS;
  }
}

namespace mine {
FW_KERNEL scale(fw::array<float> x, float factor) {
  for (uint64_t i = fw::base::thread_index(); i < x.size(); i += fw::base::thread_count()) {
    x.store(i, x[i] * factor);
  }
}
}  // namespace mine

FW_KERNEL transpose(fw::array<const int32_t, 2> from, fw::array<int32_t, 2> to) {
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < from.extent(0); i += step) {
    for (uint64_t j = 0; j < from.extent(1); j++) to.store_at(from(i, j), j, i);
  }
}

FW_KERNEL keep(void* out, bool flag, int8_t small, uint16_t medium, int32_t i, uint64_t large,
               float single, double both, pair p) {
  if (fw::base::thread_index() != 0) return;
  double* to = static_cast<double*>(out);
  to[0] = flag;
  to[1] = small;
  to[2] = medium;
  to[3] = i;
  to[4] = double(large);
  to[5] = single;
  to[6] = both;
  to[7] = p.key;
  to[8] = p.value;
}

FW_KERNEL sum_values(const pair* pairs, uint64_t n, double* out) {
  if (fw::base::thread_index() != 0) return;
  for (uint64_t i = 0; i < n; i++) *out += pairs[i].value;
}

FW_KERNEL count_threads(uint32_t* seen) {
  seen[fw::base::thread_index()] = fw::base::thread_count();
}

FW_KERNEL increment(float* x, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) x[i] += 1;
}

FW_KERNEL add(fw::array<const float> a, fw::array<const float> b, fw::array<float> sum) {
  for (uint64_t i = fw::base::thread_index(); i < sum.size(); i += fw::base::thread_count()) {
    sum.store(i, a[i] + b[i]);
  }
}
