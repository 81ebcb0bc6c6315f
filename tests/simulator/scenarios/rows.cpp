// The kernels that move rows: some warps gather while others scatter, prefetch or flush.
#include "simulator/row_job.h"

using namespace fw::simulator;

FW_SCENARIO(rows, "gather and scatter of rows and elements, side by side") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.tier_ways = run.random.below(3);
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  constexpr uint32_t kRowWords[] = {1, 1, 3, 8, 64};
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t words = run.random.pick(kRowWords);
    const uint32_t rows = 1 + run.random.below(words == 64 ? 3 : 2 * kWidth + 2);
    const uint32_t gathering = (1 + run.random.below(shape.warps)) * kWidth;
    const uint32_t threads = shape.warps * kWidth;
    RowJob gather(data, words, rows, false, run.random);
    RowJob scatter(data, run.random.chance(50) ? words : 64, 1 + run.random.below(2), true,
                   run.random);
    machine.launch([&](Thread& t) {
      if (t.index < gathering) {
        gather.run(t.index, gathering);
      } else {
        scatter.run(t.index - gathering, threads - gathering);
      }
    });
    data.check();
    machine.settle();
  }
}

FW_SCENARIO(flush, "a warp flushes what it has stored, while others go on") {
  const Shape shape = Shape::draw(run.random);
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  const uint64_t* stored = reinterpret_cast<const uint64_t*>(machine.storage(0));
  const fw::kernels::maintenance_params p = machine.maintenance(0);
  machine.launch([&](Thread& t) {
    if (t.warp != 0) {
      for (uint32_t n = 0; n < 3; ++n) {
        if (t.random.chance(30)) {
          data.store(data.pick(t.random));
        } else {
          data.load(data.pick(t.random));
        }
      }
      return;
    }
    // Elements to which no other warp stores, between those that the other warps pick.
    const uint32_t mine = t.random.below(shape.lines - 1) * 64 + 2 + t.lane;
    const uint64_t value = data.store(mine);
    become(t.lane, kWidth);
    // A launch would begin and end in order; inside of one the warp has to see to that.
    fw::warp::sync(fw::warp::kFullMask);
    fw_flush_lines(p);
    fw::warp::sync(fw::warp::kFullMask);
    if (stored[mine] != value) scheduler.fail("a flush has left a store behind");
  });
  data.check();
  machine.settle();
}
