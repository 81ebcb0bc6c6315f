// A kernel that goes on reading a file while it leaves the file's pages.
#include "flashwarp/array.cuh"

// Loads all elements again and again for `run_ns` and until it has seen a new one, for a minute at
// most, through a cache that holds few of them, and once at least. Counts in `counts[0]` the loads that gave neither the element's number nor that plus
// `added`, and in `counts[1]` those that gave the latter.
FW_KERNEL watch(fw::array<const int64_t> x, int64_t added, uint64_t run_ns, uint64_t* counts) {
  const uint64_t begin = fw::base::clock_ns();
  uint64_t wrong = 0;
  uint64_t fresh = 0;
  const bool looks = fw::base::thread_index() < x.size();
  uint64_t lasted_ns = 0;
  do {
    for (uint64_t i = fw::base::thread_index(); i < x.size(); i += fw::base::thread_count()) {
      const int64_t value = x[i];
      wrong += value != int64_t(i) && value != int64_t(i) + added;
      fresh += value == int64_t(i) + added;
    }
    lasted_ns = fw::base::clock_ns() - begin;
  } while (lasted_ns < run_ns || (looks && fresh == 0 && lasted_ns < 60'000'000'000));
  fw::atomic::add_relaxed(&counts[0], wrong);
  fw::atomic::add_relaxed(&counts[1], fresh);
}

// Counts the elements that still are their own numbers, after `fw::refresh` if `refreshes`.
FW_KERNEL count_old(fw::array<const int64_t> x, uint32_t refreshes, uint64_t* old) {
  if (refreshes != 0) fw::refresh(x);
  for (uint64_t i = fw::base::thread_index(); i < x.size(); i += fw::base::thread_count()) {
    if (x[i] == int64_t(i)) fw::atomic::add_relaxed(old, uint64_t(1));
  }
}
