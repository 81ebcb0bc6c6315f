// Warp collectives of the simulator, where each lane is a fibre.
#pragma once

#include "flashwarp/base/simulator/hooks.cuh"

namespace fw::warp {

inline uint32_t lane() { return simulator::here->lane; }
// Always inlined, because the simulator knows a place in the code by its return address.
FW_DEVICE uint32_t active(FW_SITE) { return simulator::active(at); }
inline void sync(uint32_t mask, FW_SITE) { simulator::sync(mask, at); }
inline uint32_t ballot(uint32_t mask, bool predicate, FW_SITE) {
  return simulator::ballot(mask, predicate, at);
}
inline bool any(uint32_t mask, bool predicate, FW_SITE) {
  return simulator::ballot(mask, predicate, at) != 0;
}
inline uint32_t match(uint32_t mask, uint64_t value, FW_SITE) {
  return simulator::match(mask, value, at);
}
template <typename T>
inline T take(uint32_t mask, T value, uint32_t source, FW_SITE) {
  return T(simulator::take(mask, uint64_t(value), source, at));
}
template <typename T>
inline T broadcast(uint32_t mask, T value, uint32_t source, FW_SITE) {
  return take(mask, value, source, at);
}
inline uint32_t index() { return simulator::here->index / FW_WARP_WIDTH; }
inline uint32_t count() { return simulator::here->count / FW_WARP_WIDTH; }
inline constexpr uint32_t kFullMask = uint32_t((uint64_t(1) << FW_WARP_WIDTH) - 1);

}  // namespace fw::warp
