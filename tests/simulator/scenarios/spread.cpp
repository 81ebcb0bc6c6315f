// Volumes of several namespaces: stripes, replicas, and one drive among them that fails.
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

Shape draw_spread(Random& random, fw::cache::spread spread) {
  Shape shape = Shape::draw(random);
  shape.spread = spread;
  shape.namespaces = 2 + random.below(2);
  shape.stripe_lines = 1 + random.below(3);
  shape.volumes = 1 + random.chance(30);
  shape.first_deeper = random.below(2);
  return shape;
}

// Every thread loads, prefetches and, where there are stores, stores.
void use_spread(Run& run, Machine& machine, uint32_t stores) {
  const Shape& shape = machine.shape();
  const auto volumes = elements_of(machine);
  const uint32_t operations = kWidth == 1 ? 1 + run.random.below(4) : 1 + run.random.below(2);
  for (uint32_t round = 0; round < 2; ++round) {
    machine.launch([&](Thread& t) {
      for (uint32_t n = 0; n < operations; ++n) {
        volumes[t.random.below(shape.volumes)]->use(t.random, stores, 85);
      }
    });
    for (auto& data : volumes) data->check();
    machine.settle();
    if (machine.timed_out()) return;
    if (run.random.chance(30)) machine.invalidate(run.random.below(shape.volumes));
  }
}

// Faults of one namespace: the others go on.
void draw_bad(Run& run, Shape& shape) {
  draw_faults(run);
  if (run.random.chance(70)) shape.bad = int(run.random.below(shape.namespaces));
}

}  // namespace

FW_SCENARIO(stripe, "loads, stores and prefetches on stripes over two or three drives") {
  const Shape shape = draw_spread(run.random, fw::cache::kStriped);
  Machine machine(run, shape);
  use_spread(run, machine, run.random.below(60));
}

FW_SCENARIO(stripe_faults, "the same, where one of the drives, or each, fails, tears and stops") {
  Shape shape = draw_spread(run.random, fw::cache::kStriped);
  draw_bad(run, shape);
  Machine machine(run, shape);
  use_spread(run, machine, run.random.below(60));
}

FW_SCENARIO(replicate, "loads, stores and prefetches on two or three drives that hold the same") {
  const Shape shape = draw_spread(run.random, fw::cache::kReplicated);
  Machine machine(run, shape);
  use_spread(run, machine, run.random.below(60));
}

FW_SCENARIO(replicate_faults,
            "the same, where one of the drives, or each, fails, tears and stops") {
  Shape shape = draw_spread(run.random, fw::cache::kReplicated);
  draw_bad(run, shape);
  Machine machine(run, shape);
  use_spread(run, machine, run.random.below(60));
}

FW_SCENARIO(replica_lost, "one replica fails every command: all loads succeed") {
  Shape shape = draw_spread(run.random, fw::cache::kReplicated);
  shape.bad = int(run.random.below(shape.namespaces));
  // Mapped data moves without the disk, which then cannot fail.
  shape.path = run.random.chance(50) ? fw::nvme::kBounce : fw::nvme::kDirect;
  if (!run.faults_given) {
    run.faults.errors = 100;
    run.faults.wait = run.random.chance(50) ? 60 : 0;
  }
  Machine machine(run, shape);
  machine.spare_accesses();
  use_spread(run, machine, 0);
}

FW_SCENARIO(two_rings, "write-backs that need slots of a ring of four and of one of two entries") {
  Shape shape;
  shape.spread = fw::cache::kReplicated;
  shape.namespaces = 2;
  shape.sets = 2;
  shape.first_deeper = 1;
  shape.lines = 8;
  shape.path = fw::nvme::kBounce;
  shape.warps = kWidth == 32 ? 3 : 6;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  const fw::kernels::maintenance_params p = machine.maintenance(0);
  machine.launch([&](Thread& t) {
    const uint32_t line = t.warp;
    for (uint32_t n = 0; n < 4; ++n) {
      if (t.lane == 0) data.store(line * 64);
      fw::warp::sync(fw::warp::kFullMask);
      const fw::cache::place at = fw::cache::probe(p.cache->geometry, line);
      fw::cache::flush_ways(*p.cache, *p.volume, fw::lanes::all(), at.found && t.lane == 0, at.way,
                            line, line + 1);
    }
  });
  data.check();
  machine.settle();
}
