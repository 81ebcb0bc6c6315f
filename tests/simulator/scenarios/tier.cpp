// The host tier: lines move from a few frames to a few places, and back.
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

Shape draw_tier(Random& random) {
  Shape shape = Shape::draw(random);
  shape.sets = 1 + random.below(2);
  shape.lines = 6 + random.below(7);
  shape.tier_ways = 1 + random.below(3);
  shape.tier_subsets = 1 + random.below(2);
  return shape;
}

// Every element of a volume, changed in the storage while no line of it is cached: what a line left
// behind in the tier would hide.
void change_behind(Machine& machine, uint32_t v, Elements<>& data) {
  machine.invalidate(v);
  data.restart();
}

void use_tier(Run& run, const Shape& shape, uint32_t operations) {
  Machine machine(run, shape);
  const auto volumes = elements_of(machine);
  const uint32_t stores = run.random.below(50);
  for (uint32_t round = 0; round < 3; ++round) {
    machine.launch([&](Thread& t) {
      for (uint32_t n = 0; n < operations; ++n) {
        volumes[t.random.below(shape.volumes)]->use(t.random, stores, 80);
      }
    });
    for (auto& data : volumes) data->check();
    machine.settle();
    if (machine.timed_out()) return;
    const uint32_t v = run.random.below(shape.volumes);
    if (run.random.chance(30)) change_behind(machine, v, *volumes[v]);
  }
}

}  // namespace

FW_SCENARIO(tier, "loads, stores and prefetches through a few frames and a few places below them") {
  const Shape shape = draw_tier(run.random);
  use_tier(run, shape, kWidth == 1 ? 2 + run.random.below(5) : 1 + run.random.below(3));
}

FW_SCENARIO(tier_faults, "the same over disks that fail, wait, tear and stop") {
  const Shape shape = draw_tier(run.random);
  draw_faults(run);
  use_tier(run, shape, kWidth == 1 ? 1 + run.random.below(4) : 1 + run.random.below(2));
}
