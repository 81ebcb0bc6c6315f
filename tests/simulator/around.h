// Loads of elements around the cache, by reads of a file over the elements' volume.
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

}  // namespace fw::simulator
