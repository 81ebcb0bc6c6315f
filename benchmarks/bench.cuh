// What kernels of several benchmarks share: random numbers and loads, plain rows, and reads past
// the cache.
#pragma once

#include "flashwarp/array.cuh"

namespace bench {

using namespace fw;

FW_HOST_DEVICE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

// Sums `count` random ones of so many elements.
template <typename Load>
FW_DEVICE void sum_random(uint64_t length, uint64_t count, uint64_t seed, uint64_t* sum,
                          Load load) {
  uint64_t total = 0;
  for (uint64_t k = fw::base::thread_index(); k < count; k += fw::base::thread_count()) {
    total += load(fw::base::multiply_high(mix64(k + seed), length));
  }
  fw::atomic::add_relaxed(sum, total);
}

// Copies rows of 2^shift words of 16 bytes from `source` to `target`, in the order of `ids`: what
// warps reach where they can load themselves. A lane has eight words on their way.
FW_DEVICE void copy_rows(uint64_t source, const int64_t* ids, uint64_t target, uint64_t words,
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

// Reads `blocks` blocks from `lba` on by one command for each lane of `members`, and waits for
// them. Calls use(bundle, address, good) with all lanes of `here` for each bundle that a ring has
// slots for: where a lane's data lies, and whether it came. If commands move the data themselves,
// it lies at `target`. False when the storage does not answer; errors are recorded with the volume.
template <typename Use>
FW_DEVICE bool read_blocks(cache::line_cache& c, cache::volume& v, nvme::queue_pair& q, lanes here,
                           lanes members, uint64_t lba, uint32_t blocks, uint64_t target, Use use) {
  cache::line_finisher finisher{c};
  while (members) {
    const lanes bundle = cache::first_bundle(q, members);
    const bool mine = bundle.mine();
    members -= bundle;
    const uint32_t ticket = nvme::take_tickets(q, here, bundle);
    if (!nvme::wait_for_slots(q, here, bundle, ticket, finisher)) {
      if (mine) cache::record_error(v, nvme::kTimedOut, nvme::kRead, v.line_begin);
      return false;
    }
    uint64_t address = target;
    if (q.data.path == nvme::kInPlace) address = q.data.mapped_base + (lba << nvme::kLbaShift);
    if (q.data.path == nvme::kBounce) address = nvme::buffer_of(q, ticket);
    if (mine) {
      nvme::write_entry(q, ticket,
                        nvme::block_command(nvme::kRead, uint16_t(nvme::entry_of(q, ticket)), lba,
                                            blocks, address, 0),
                        0);
    }
    here.sync();
    nvme::publish(q, here);
    const uint32_t status = nvme::wait_for_completions(q, here, bundle, ticket, finisher);
    if (mine && status != nvme::kSuccess) {
      cache::record_error(v, status, nvme::kRead, v.line_begin);
    }
    use(bundle, address, mine && status == nvme::kSuccess);
    if (mine && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
  }
  return true;
}

}  // namespace bench
