// The kernels that move rows: some warps gather while others scatter, prefetch or flush.
#include "simulator/miss_list.h"
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

FW_SCENARIO(rows_resident, "gathers of a few resident rows, while others evict their lines") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.sets = 1;
  shape.lines = 5;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  for (uint32_t round = 0; round < 3; ++round) {
    // So many rows that a warp takes one at a time.
    RowJob gather(data, run.random.chance(50) ? 8 : 64, kWidth, false, run.random);
    machine.launch([&](Thread& t) {
      if (t.warp == 0) return gather.run(t.index, kWidth);
      for (uint32_t n = 0; n < 4; ++n) {
        data.use(t.random);
      }
    });
    data.check();
    machine.settle();
  }
}

FW_SCENARIO(rows_streamed, "gathers around the cache, while others store and evict lines") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.sets = 1;
  shape.lines = 5 + run.random.below(3);
  shape.path = fw::nvme::kInPlace;
  shape.plain = !run.random.chance(20);
  shape.streamed = true;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  for (uint32_t round = 0; round < 3; ++round) {
    constexpr uint32_t kRowWords[] = {3, 8, 64};
    const uint32_t rows = 1 + run.random.below(kWidth + 4);
    RowJob gather(data, run.random.pick(kRowWords), rows, false, run.random);
    gather.streams();
    machine.launch([&](Thread& t) {
      if (t.warp == 0) return gather.run(t.index, kWidth);
      for (uint32_t n = 0; n < 6; ++n) {
        data.use(t.random);
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

FW_SCENARIO(deferral, "launches leave their misses to some warps, by way of one list") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.plain = false;
  shape.warps = kWidth == 32 ? 3 : 3 + run.random.below(3);
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  // Lists that have room for all misses, and lists that fill.
  const uint32_t lanes_log2 = kWidth == 1 ? 2 : kWidth == 4 ? 4 : 7;
  MissList misses(machine, lanes_log2 + run.random.below(4));
  constexpr uint32_t kRowWords[] = {1, 1, 3, 8, 64};
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t words = run.random.pick(kRowWords);
    const uint32_t rows = 1 + run.random.below(words == 64 ? 6 : 4 * kWidth + 4);
    const uint32_t gathering = (2 + run.random.below(shape.warps - 1)) * kWidth;
    const uint32_t threads = shape.warps * kWidth;
    RowJob gather(data, words, rows, false, run.random);
    RowJob scatter(data, run.random.chance(50) ? words : 64, 1 + run.random.below(2), true,
                   run.random);
    gather.defer(misses.next_launch(), 1 + run.random.below(2));
    if (run.random.chance(70)) scatter.defer(misses.next_launch(), 1);
    if (words != 1 && run.random.chance(30)) gather.prefetch_first(misses.next_launch());
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

FW_SCENARIO(deferral_blocks, "two launches in blocks of several warps share one list") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.plain = false;
  // Each launch has two blocks: one leaves its misses to the other.
  constexpr uint32_t kFirst = 4 * kWidth;
  constexpr uint32_t kSecond = (kWidth == 32 ? 2 : 4) * kWidth;
  shape.warps = (kFirst + kSecond) / kWidth;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  MissList misses(machine, kWidth == 1 ? 5 : kWidth == 4 ? 7 : 10);
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t words = run.random.chance(50) ? 1 : 64;
    const auto make = [&](uint32_t threads) {
      const uint32_t rows = 1 + run.random.below(words == 64 ? 8 : 4 * kWidth);
      RowJob job(data, words, rows, false, run.random);
      job.defer(misses.next_launch(), 1);
      job.divide(threads / kWidth / 2,
                 machine.allocate<block_barrier>(2, "barriers", Sharing::kAtomic));
      return job;
    };
    RowJob first = make(kFirst);
    RowJob second = make(kSecond);
    machine.launch([&](Thread& t) {
      if (t.index < kFirst) {
        first.run(t.index, kFirst);
      } else {
        second.run(t.index - kFirst, kSecond);
      }
    });
    data.check();
    machine.settle();
  }
}

FW_SCENARIO(deferral_prefetch, "a prefetch whose indices change beside a gather, by one list") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.plain = false;
  constexpr uint32_t kFirst = 4 * kWidth;
  constexpr uint32_t kSecond = (kWidth == 32 ? 2 : 4) * kWidth;
  shape.warps = (kFirst + kSecond) / kWidth + 1;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  MissList misses(machine, (kWidth == 1 ? 4 : kWidth == 4 ? 6 : 9) + run.random.below(2));
  constexpr uint32_t kRowWords[] = {3, 8, 64};
  const bool garbage = run.random.chance(70);
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t words = run.random.pick(kRowWords);
    const auto make = [&](uint32_t threads) {
      const uint32_t rows = 1 + run.random.below(words == 64 ? 12 : 4 * kWidth);
      RowJob job(data, words, rows, false, run.random);
      job.defer(misses.next_launch(), 1);
      job.divide(threads / kWidth / 2,
                 machine.allocate<block_barrier>(2, "barriers", Sharing::kAtomic));
      return job;
    };
    const bool swap = run.random.chance(50);
    RowJob first = make(kFirst);
    RowJob second = make(kSecond);
    RowJob& ahead = swap ? first : second;
    ahead.only_prefetches();
    machine.launch([&](Thread& t) {
      if (t.index < kFirst) {
        first.run(t.index, kFirst);
      } else if (t.index < kFirst + kSecond) {
        second.run(t.index - kFirst, kSecond);
      } else if (garbage && t.lane == 0) {
        for (uint32_t n = 0; n < 12; ++n) {
          ahead.change_an_index(t.random);
          fw::base::pause(200);
        }
      }
    });
    data.check();
    machine.settle();
  }
}

FW_SCENARIO(deferral_faults, "the same with gathers only, over disks that fail, wait and stop") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.plain = false;
  shape.warps = kWidth == 32 ? 3 : 3 + run.random.below(2);
  draw_faults(run);
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  MissList misses(machine, kWidth == 1 ? 4 : kWidth == 4 ? 6 : 9);
  // A row of several words may have part of another line if its own cannot be read.
  const uint32_t words = machine.faulty() ? 1 : 8;
  for (uint32_t round = 0; round < 2; ++round) {
    RowJob gather(data, words, 1 + run.random.below(4 * kWidth + 4), false, run.random);
    gather.defer(misses.next_launch(), 1 + run.random.below(2));
    if (machine.faulty()) gather.may_fail();
    const uint32_t threads = shape.warps * kWidth;
    machine.launch([&](Thread& t) { gather.run(t.index, threads); });
    data.check();
    machine.settle();
    if (machine.timed_out()) return;
  }
}
