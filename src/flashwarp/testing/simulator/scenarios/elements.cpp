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
  // Threads tell each other what they know: happens-before beyond the library's own.
  auto* flag = machine.allocate<uint32_t>(1, "flag", Sharing::kAtomic);
  const uint32_t rounds = 1 + run.random.below(2);
  const uint32_t stores = run.random.below(60);
  for (uint32_t round = 0; round < rounds; ++round) {
    machine.launch([&](Thread& t) {
      fw::cursor<uint64_t> cursor(volumes[0]->array());
      for (uint32_t n = 0; n < operations; ++n) {
        Elements<>& data = *volumes[t.random.below(shape.volumes)];
        const uint32_t i = data.pick(t.random);
        const uint32_t dice = t.random.below(100);
        if (dice < stores) {
          data.store(i);
          if (dice % 2 == 0) fw::atomic::store_release(flag, t.index);
        } else if (dice < 70) {
          if (dice % 2 == 0) fw::atomic::load_acquire(flag);
          data.load(i);
        } else if (dice < 85) {
          data.prefetch(i);
        } else {
          volumes[0]->load_by(volumes[0]->pick(t.random), "load through a cursor",
                              [&](uint32_t j) { return cursor[j]; });
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

FW_SCENARIO(elements, "loads, stores, prefetches and cursors on a cache of a few frames") {
  const Shape shape = Shape::draw(run.random);
  use_elements(run, shape, kWidth == 1 ? 1 + run.random.below(5) : 1 + run.random.below(2));
}

FW_SCENARIO(faults, "the same over disks that fail, wait, tear and stop") {
  const Shape shape = Shape::draw(run.random);
  draw_faults(run, shape);
  use_elements(run, shape, kWidth == 1 ? 1 + run.random.below(4) : 1);
}

FW_SCENARIO(pair, "two threads on two lines: small enough for every schedule") {
  Shape shape;
  shape.lines = 2;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  machine.launch([&](Thread& t) {
    const uint32_t i = t.warp * 64 + t.lane;
    data.store(i);
    data.load((1 - t.warp) * 64 + t.lane);
  });
  data.check();
  machine.settle();
}
