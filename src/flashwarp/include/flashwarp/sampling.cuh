// Uniform samples of neighbour lists, and numbers for the vertices in them: what a mini-batch of a
// graph network needs.
//
// A sample depends on the seed, the draw and the vertex alone, so it is the same on every device.
// Each hop has `fanout` slots for each vertex of its frontier. A vertex gets the number that its
// first slot has among all first slots, whichever thread came first.
#pragma once

#include "flashwarp/array.cuh"

namespace fw::graph {

// 2^64 divided by the golden ratio: the step of SplitMix64.
inline constexpr uint64_t kRandomStep = 0x9e3779b97f4a7c15ull;

// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
FW_HOST_DEVICE uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Where the random numbers of one list begin.
FW_HOST_DEVICE uint64_t random_stream(uint64_t seed, uint64_t draw, uint64_t vertex) {
  return mix(mix(mix(seed + kRandomStep) + draw) + vertex);
}

// A number below `bound`. The chances of two numbers differ by less than bound / 2^64.
FW_DEVICE uint64_t random_below(uint64_t stream, uint64_t i, uint64_t bound) {
  return base::multiply_high(mix(stream + (i + 1) * kRandomStep), bound);
}

// Chooses min(fanout, degree) of the numbers below `degree`, all different; every such set has the
// same chance (Floyd's algorithm). All lanes of a warp call together. The lane writes and reads
// chosen[lane], chosen[lane + width] and so on, and no others. Returns how many there are.
FW_DEVICE uint32_t choose(uint64_t degree, uint32_t fanout, uint64_t stream, int64_t* chosen) {
  if (degree <= fanout) {
    for (uint32_t i = warp::lane(); i < degree; i += warp::kWarpWidth) chosen[i] = int64_t(i);
    return uint32_t(degree);
  }
  for (uint32_t i = 0; i < fanout; i++) {
    const uint64_t last = degree - fanout + i;
    const int64_t drawn = int64_t(random_below(stream, i, last + 1));
    bool taken = false;
    for (uint32_t k = warp::lane(); k < i; k += warp::kWarpWidth) taken |= chosen[k] == drawn;
    taken = lanes::all().any(taken);
    if (i % warp::kWarpWidth == warp::lane()) chosen[i] = taken ? int64_t(last) : drawn;
  }
  return fanout;
}

// The vertices of a sample, in a hash table with linear probing. The caller fills `keys` and
// `first` with ones before, and has at least twice as many places as there are vertices.
struct vertex_table {
  uint64_t* keys;
  uint32_t* first;   // the first slot that has the vertex
  uint32_t* number;  // of vertices whose first slot is not a seed
  uint64_t mask;     // places - 1, a power of two less one

  static constexpr uint64_t kFree = ~0ull;

  // Enters a vertex that a slot has; returns its place.
  FW_DEVICE uint64_t enter(uint64_t vertex, uint32_t slot) const {
    uint64_t place = mix(vertex) & mask;
    // Bounded, since half of the places stay free.
    while (true) {
      uint64_t key = atomic::load_relaxed(&keys[place]);
      if (key == kFree && atomic::cas_acq_rel(&keys[place], kFree, vertex)) key = vertex;
      // Another thread may have taken the place meanwhile, perhaps for the same vertex.
      if (key == kFree) key = atomic::load_relaxed(&keys[place]);
      if (key == vertex) break;
      place = (place + 1) & mask;
    }
    uint32_t before = atomic::load_relaxed(&first[place]);
    // Bounded by the slots that enter the vertex: one of them succeeds in each round.
    while (slot < before && !atomic::cas_acq_rel(&first[place], before, slot)) {
      before = atomic::load_relaxed(&first[place]);
    }
    return place;
  }

  // The number of a vertex in the sample: seeds have those of their slots.
  FW_DEVICE uint32_t number_at(uint64_t place, uint32_t seeds) const {
    const uint32_t slot = first[place];
    return slot < seeds ? slot : number[place];
  }
};

}  // namespace fw::graph
