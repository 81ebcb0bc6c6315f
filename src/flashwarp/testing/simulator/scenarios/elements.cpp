// Single elements of arrays: what every thread may do at any time, in divergent code too.
#include "flashwarp/testing/simulator/machine.h"

using namespace fw::simulator;

namespace {

void use_elements(Run& run, const Shape& shape, uint32_t operations) {
  Machine machine(run, shape);
  std::vector<std::unique_ptr<Elements<>>> volumes;
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    volumes.push_back(std::make_unique<Elements<>>(machine, v));
  }
  const uint32_t rounds = 1 + run.random.below(2);
  const uint32_t stores = run.random.below(60);
  for (uint32_t round = 0; round < rounds; ++round) {
    machine.launch([&](Thread& t) {
      for (uint32_t n = 0; n < operations; ++n) {
        Elements<>& data = *volumes[t.random.below(shape.volumes)];
        const uint32_t i = data.pick(t.random);
        if (t.random.chance(stores)) {
          data.store(i);
        } else if (t.random.chance(15)) {
          data.prefetch(i);
        } else {
          data.load(i);
        }
      }
    });
    for (auto& data : volumes) data->check();
    machine.settle();
    if (machine.timed_out()) return;
    if (run.random.chance(30)) machine.invalidate(run.random.below(shape.volumes));
  }
}

}  // namespace

FW_SCENARIO(elements, "loads, stores and prefetches of elements on a cache of a few frames") {
  const Shape shape = Shape::draw(run.random);
  use_elements(run, shape, kWidth == 1 ? 1 + run.random.below(5) : 1 + run.random.below(2));
}

FW_SCENARIO(faults, "the same over disks that fail, wait, tear and stop") {
  Shape shape = Shape::draw(run.random);
  draw_faults(run);
  use_elements(run, shape, kWidth == 1 ? 1 + run.random.below(4) : 1);
}
