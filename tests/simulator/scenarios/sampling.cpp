// Samples of neighbour lists: distinct entries by all lanes, and one place and the first slot for
// each vertex, whichever thread comes first.
#include "flashwarp/sampling.cuh"

#include <algorithm>
#include <set>
#include <vector>

#include "flashwarp/array.cuh"
#include "simulator/miss_list.h"

#define COLUMN int64_t
#define OFFSET int64_t
#include "flashwarp/interop/torch/sampling.cu"

using namespace fw::simulator;

namespace {

// Floyd's algorithm for one thread: what the lanes of a warp must choose together.
std::vector<int64_t> chosen_alone(uint64_t degree, uint32_t fanout, uint64_t stream) {
  std::vector<int64_t> chosen;
  if (degree <= fanout) {
    for (uint64_t i = 0; i < degree; i++) chosen.push_back(int64_t(i));
    return chosen;
  }
  for (uint64_t i = 0; i < fanout; i++) {
    const uint64_t last = degree - fanout + i;
    const int64_t drawn = int64_t(fw::graph::random_below(stream, i, last + 1));
    const bool taken = std::find(chosen.begin(), chosen.end(), drawn) != chosen.end();
    chosen.push_back(taken ? int64_t(last) : drawn);
  }
  return chosen;
}

struct Slots {
  std::vector<int64_t> found;
  std::vector<uint64_t> keys;
  std::vector<uint32_t> first;
  uint64_t mask;

  Slots(uint64_t slots, uint64_t places)
      : found(slots, -1), keys(places, ~0ull), first(places, ~0u), mask(places - 1) {}
};

// Each vertex has one place, and there the first of its slots.
void check(const Slots& s) {
  std::set<uint64_t> vertices(s.found.begin(), s.found.end());
  vertices.erase(~0ull);
  std::set<uint64_t> placed;
  for (uint64_t place = 0; place <= s.mask; place++) {
    if (s.keys[place] == ~0ull) continue;
    if (!placed.insert(s.keys[place]).second) throw Failure("a vertex has two places\n");
    const auto at = std::find(s.found.begin(), s.found.end(), int64_t(s.keys[place]));
    if (at == s.found.end()) throw Failure("a vertex that no slot has is in the table\n");
    if (s.first[place] != uint32_t(at - s.found.begin())) {
      throw Failure("a vertex has not the first of its slots\n");
    }
  }
  if (placed != vertices) throw Failure("a vertex of a slot is not in the table\n");
}

}  // namespace

FW_SCENARIO(sampling, "warps sample lists and enter what they find into one table") {
  Shape shape;
  shape.warps = kWidth == 1 ? 2 + run.random.below(3) : 1 + run.random.below(2);
  Machine machine(run, shape);
  const uint64_t vertices = 1 + run.random.below(6);
  const uint32_t fanout = 1 + run.random.below(kWidth == 1 ? 4 : kWidth + 2);
  const uint64_t seed = run.random.below(1000);
  // Lists of all lengths around the fan-out, some of vertices that occur more than once.
  std::vector<uint64_t> degrees;
  for (uint64_t v = 0; v < 3 * shape.warps; v++)
    degrees.push_back(run.random.below(2 * fanout + 2));
  uint64_t places = 2;
  while (places < 2 * vertices) places *= 2;
  Slots slots(degrees.size() * fanout, places);
  machine.launch([&](Thread& t) {
    const fw::graph::vertex_table table = {slots.keys.data(), slots.first.data(), nullptr,
                                           slots.mask};
    for (uint64_t list = t.warp; list < degrees.size(); list += machine.shape().warps) {
      int64_t* own = slots.found.data() + list * fanout;
      const uint64_t stream = fw::graph::random_stream(seed, 0, list);
      const uint32_t count = fw::graph::choose(degrees[list], fanout, stream, own);
      const std::vector<int64_t> expected = chosen_alone(degrees[list], fanout, stream);
      if (count != expected.size()) scheduler.fail("a sample has another size");
      for (uint32_t k = t.lane; k < count; k += kWidth) {
        if (own[k] != expected[k]) scheduler.fail("lanes have chosen another entry");
        own[k] = int64_t((list + uint64_t(own[k])) % vertices);
        table.enter(uint64_t(own[k]), uint32_t(list * fanout + k));
      }
      fw::warp::sync(fw::warp::kFullMask);
    }
  });
  check(slots);
}

FW_SCENARIO(sampling_absent, "warps leave lists that would wait to some of them, by one list") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 2;
  shape.plain = false;
  shape.sets = 1;
  shape.warps = kWidth == 32 ? 3 : 4;
  Machine machine(run, shape);
  MissList misses(machine, (kWidth == 1 ? 3 : kWidth == 4 ? 5 : 8) + run.random.below(3));
  const array<const int64_t> offsets = machine.array<int64_t>(0);
  const array<const int64_t> entries = machine.array<int64_t>(1);
  const uint32_t fanout = 1 + run.random.below(kWidth == 1 ? 4 : kWidth + 2);
  const uint64_t vertices = offsets.length - 1;
  // Lists that lie back to back, round and round; no two entries of one list are the same.
  const uint64_t degree = entries.length / vertices;
  for (uint64_t v = 0; v <= vertices; v++) {
    *reinterpret_cast<int64_t*>(machine.stored(0, v * 8)) = int64_t(v * degree);
  }
  for (uint64_t i = 0; i < entries.length; i++) {
    *reinterpret_cast<int64_t*>(machine.stored(1, i * 8)) = int64_t(i % vertices);
  }
  const uint64_t seed = run.random.below(1000);
  std::vector<int64_t> nodes;
  for (uint32_t i = 0; i < 4 * shape.warps; i++) {
    nodes.push_back(run.random.below(uint32_t(vertices)));
  }
  const std::vector<int64_t> nodes_end = {int64_t(nodes.size())};
  uint64_t places = 2;
  while (places < 2 * nodes.size() * fanout) places *= 2;
  Slots slots(nodes.size() * fanout, places);
  std::vector<int64_t> edges(slots.found.size(), -1);
  std::vector<int32_t> at(slots.found.size(), -1);
  const auto use = misses.next_launch(1 + run.random.below(2), 1);
  machine.launch([&](Thread& t) {
    become(t.index, shape.warps * kWidth);
    sample_lists(offsets, entries, 0, nodes.data(), nodes_end.data(), 1, fanout, seed, 0, 0,
                 slots.found.data(), edges.data(), at.data(),
                 reinterpret_cast<int64_t*>(slots.keys.data()),
                 reinterpret_cast<int32_t*>(slots.first.data()), slots.mask,
                 reinterpret_cast<uint64_t>(use.list), use.launch, use.blocks);
  });
  for (size_t k = 0; k < nodes.size(); k++) {
    const uint64_t vertex = uint64_t(nodes[k]);
    const uint64_t stream = fw::graph::random_stream(seed, 0, vertex);
    const std::vector<int64_t> chosen = chosen_alone(degree, fanout, stream);
    for (size_t i = 0; i < fanout; i++) {
      const int64_t entry = i < chosen.size() ? int64_t(vertex * degree) + chosen[i] : -1;
      const int64_t neighbour = entry < 0 ? -1 : entry % int64_t(vertices);
      if (slots.found[k * fanout + i] != neighbour) scheduler.fail("a slot has another vertex");
    }
  }
  check(slots);
  machine.settle();
}
