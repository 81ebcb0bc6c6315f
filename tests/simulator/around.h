// Loads and stores of elements around the cache, by calls of a file over the elements' volume.
#pragma once

#include "flashwarp/file.cuh"
#include "simulator/elements.h"

namespace fw::simulator {

inline void load_around(Machine& machine, Elements<>& data, uint32_t i, uint32_t volume = 0) {
  const fw::array<uint8_t> bytes = machine.array<uint8_t>(volume);
  const fw::file file = {bytes, nullptr, fw::kFileRead, 0, bytes.length};
  data.load_by(i, "load around the cache", [&](uint32_t j) {
    uint64_t value = 0;
    const int64_t got = fw::read_around(file, &value, uint64_t(j) * 8, 8);
    return got == 8 ? value : 0;
  });
}

// Returns the value stored.
inline uint64_t store_around(Machine& machine, Elements<>& data, uint32_t i, fw::file_state& state,
                             uint32_t volume = 0) {
  const fw::array<uint8_t> bytes = machine.array<uint8_t>(volume);
  const fw::file file = {bytes, &state, fw::kFileWrite, 0, 0};
  return data.store_by(i, "store around the cache", [&](uint32_t j, uint64_t value) {
    const int64_t got = fw::write_around(file, &value, uint64_t(j) * 8, 8);
    return got == 8 ? uint32_t(nvme::kSuccess) : uint32_t(nvme::kCommandAborted);
  });
}

}  // namespace fw::simulator
