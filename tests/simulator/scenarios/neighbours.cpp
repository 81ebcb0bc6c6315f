// Arrays that share a cache: one ends while the kernels of the other arrays go on.
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

// What the host does to an array that closes: flush, quiesce, empty its frames. By one warp.
void bring_to_rest(Machine& machine, uint32_t v, const Thread& t) {
  fw::kernels::maintenance_params p = machine.maintenance(v);
  become(t.lane, kWidth);
  // A launch would begin and end in order; inside of one the warp has to see to that.
  fw::warp::sync(fw::warp::kFullMask);
  fw_flush_lines(p);
  fw::warp::sync(fw::warp::kFullMask);
  fw_quiesce(p);
  fw::warp::sync(fw::warp::kFullMask);
  fw_invalidate_lines(p);
  fw::warp::sync(fw::warp::kFullMask);
}

}  // namespace

FW_SCENARIO(neighbour_closes, "an array ends while threads of another wait, help and write back") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 2;
  shape.sets = 1;
  shape.lines = 6;
  shape.queues = 1;
  shape.depth_log2 = 1 + run.random.below(2);
  Machine machine(run, shape);
  Elements<> staying(machine, 0);
  Elements<> closing(machine, 1);
  const uint32_t operations = kWidth == 1 ? 1 + run.random.below(6) : 1 + run.random.below(3);
  const uint32_t stores = run.random.below(60);
  // In half of the runs the array that closes is only stored to, so that others write it back.
  const bool dirties = run.random.chance(50);
  machine.launch([&](Thread& t) {
    Elements<>& data = t.warp == 0 ? closing : staying;
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t dice = t.random.below(100);
      const uint32_t i = data.pick(t.random);
      if (dirties ? t.warp == 0 : dice < stores) {
        data.store(i);
      } else if (dice < 75) {
        data.load(i);
      } else {
        data.prefetch(i);
      }
    }
    if (t.warp != 0) return;
    bring_to_rest(machine, 1, t);
    if (t.lane == 0) machine.close(1);
  });
  staying.check();
  closing.check();
  machine.settle();
}
