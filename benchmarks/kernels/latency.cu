// Dependent loads: where the next one goes depends on what the last one gave, so that each is
// waited for alone. `lanes` of one warp go together, to the same element.
#include "flashwarp/array.cuh"

namespace {

FW_DEVICE uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

// Elements count themselves, so `wrong` counts loads that gave something else.
template <typename Load>
FW_DEVICE void chase(uint64_t blocks, uint64_t words, uint64_t steps, uint64_t seed, uint32_t lanes,
                     uint64_t* wrong, Load load) {
  if (fw::warp::lane() >= lanes) return;
  uint64_t errors = 0;
  uint32_t value = 0;
  for (uint64_t k = 0; k < steps; k++) {
    const uint64_t i = mixed(seed + k + value) % blocks * words + k % words;
    value = load(i);
    errors += value != uint32_t(i);
  }
  if (errors != 0) fw::atomic::add(wrong, errors);
}

}  // namespace

FW_KERNEL chase_array(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t blocks,
                      uint64_t words, uint64_t steps, uint64_t seed, uint32_t lanes,
                      uint64_t* wrong) {
  chase(blocks, words, steps, seed, lanes, wrong, [&](uint64_t i) { return data[i]; });
}

// `address`: of the storage's memory, where the device reads it.
FW_KERNEL chase_plain(uint64_t address, uint64_t blocks, uint64_t words, uint64_t steps,
                      uint64_t seed, uint32_t lanes, uint64_t* wrong) {
  const auto* fresh = reinterpret_cast<const volatile uint32_t*>(address);
  chase(blocks, words, steps, seed, lanes, wrong, [&](uint64_t i) { return fresh[i]; });
}

// Copies whole blocks from memory that the device reads, one after the other: the least that a miss
// in place can cost.
FW_KERNEL chase_copies(uint64_t address, uint32_t* to, uint64_t blocks, uint64_t words,
                       uint64_t steps, uint64_t seed, uint64_t* wrong) {
  uint64_t errors = 0;
  uint32_t value = 0;
  for (uint64_t k = 0; k < steps; k++) {
    const uint64_t first = mixed(seed + k + value) % blocks * words;
    fw::warp::copy<fw::warp::source::kStream>(fw::lanes::all(), reinterpret_cast<uint64_t>(to),
                                              address + first * sizeof(uint32_t),
                                              words * sizeof(uint32_t));
    fw::warp::sync(fw::warp::kFullMask);
    value = static_cast<const volatile uint32_t*>(to)[k % words];
    errors += value != uint32_t(first + k % words);
    fw::warp::sync(fw::warp::kFullMask);
  }
  if (errors != 0 && fw::warp::lane() == 0) fw::atomic::add(wrong, errors);
}
