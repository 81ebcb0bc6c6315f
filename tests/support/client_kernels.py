"""Kernels that tests launch on arrays of clients of a shared cache, on every device."""

KERNELS = """
#include <flashwarp/array.cuh>
FW_KERNEL total(fw::array<const int, 2> x, int64_t* sum) {
  int64_t own = 0;
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < x.size(); i += step) own += x[i];
  fw::atomic::add(sum, own);
}
FW_KERNEL negate(fw::array<int, 2> x, uint64_t n) {
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < n; i += step) x.store(i, -x[i]);
}
FW_KERNEL count(fw::array<int, 2> x) { x.atomic_add(0, 1); }
FW_KERNEL write_back(fw::array<int, 2> x) { x.write_back(0, 1).wait(); }
FW_KERNEL copy(fw::array<const int, 2> from, fw::array<int, 2> to) {
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < from.size(); i += step) to.store(i, from[i]);
}
"""
