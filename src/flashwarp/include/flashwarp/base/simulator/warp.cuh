// A warp of the simulator, where each lane is a fibre.
#pragma once

#include "flashwarp/base/simulator/hooks.cuh"

namespace fw::warp {

inline uint32_t lane() { return simulator::here->lane; }
inline uint32_t index() { return simulator::here->index / FW_WARP_WIDTH; }
inline uint32_t count() { return simulator::here->count / FW_WARP_WIDTH; }
inline constexpr uint32_t kFullMask = uint32_t((uint64_t(1) << FW_WARP_WIDTH) - 1);

namespace primitive {

using simulator::active;
using simulator::ballot;
using simulator::match;
using simulator::sync;
template <typename T>
inline uint64_t take(uint32_t mask, T value, uint32_t source, simulator::site at) {
  return simulator::take(mask, uint64_t(value), source, at);
}

}  // namespace primitive

}  // namespace fw::warp
