// Single elements of arrays, by any thread at any time, in divergent code too.
#include <map>

#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

// A slow load: other fibres run between its two looks at the tag.
struct SlowLoad {
  static constexpr bool kStores = false;
  uint64_t offset;
  uint32_t before;
  uint32_t after;
  uint64_t value = 0;
  void visit(fw::lanes, fw::lanes members, uint64_t frame) {
    if (!members.mine()) return;
    wait(before);
    value = fw::atomic::raw<8>::load(reinterpret_cast<const char*>(frame + offset));
    wait(after);
  }
  static void wait(uint32_t pauses) {
    scheduler.dawdle();
    for (uint32_t n = 0; n < pauses; ++n) fw::base::pause(0);
  }
};

uint64_t load_slowly(const fw::array<uint64_t>& a, uint32_t i, Random& random) {
  SlowLoad op = {a.offset_of(i), random.below(100), random.below(100)};
  const uint32_t status =
      fw::detail::access_slow(a.cache, a.volume, a.line_of(i), op, random.chance(50));
  return status == fw::nvme::kSuccess ? op.value : 0;
}

void use_elements(Run& run, const Shape& shape, uint32_t operations) {
  Machine machine(run, shape);
  const auto volumes = elements_of(machine);
  // Threads synchronise with each other, which adds happens-before to the library's own.
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

// Elements that are loaded together, on one line or on several.
void load_several(Machine& machine, Elements<>& data, fw::cursor<uint64_t>& cursor, uint32_t near,
                  Random& random) {
  constexpr uint32_t kCount = 4;
  constexpr uint32_t kStrides[] = {1, 20, 40, 64, 100};
  const uint32_t drawn = random.pick(kStrides);
  const uint32_t stride = (kCount - 1) * drawn < data.length() ? drawn : 1;
  const uint32_t i = std::min(near, data.length() - 1 - (kCount - 1) * stride);
  uint32_t operations[kCount];
  for (uint32_t k = 0; k < kCount; ++k) operations[k] = data.begin(i + k * stride, false, 0);
  uint64_t values[kCount];
  cursor.load(i, stride, values);
  for (uint32_t k = 0; k < kCount; ++k) {
    if (values[k] == 0 && !machine.faulty()) scheduler.fail("a load failed without a fault");
    data.end(operations[k], i + k * stride, values[k]);
  }
}

// One loop of a warp: lanes read side by side, by one of four ways, or each somewhere near.
struct Loop {
  enum Way { kLoad, kRange, kRangeEach, kWarpEach, kScattered };
  uint32_t way;
  uint32_t begin;
  uint32_t end;
  uint32_t stride;  // kLoad and kScattered
};

Loop draw_loop(const Elements<>& data, Random& random) {
  constexpr uint32_t kStrides[] = {kWidth, 20, 40, 64};
  Loop loop;
  loop.way = random.below(5);
  loop.begin = random.below(data.length() - 1);
  loop.end = std::min(loop.begin + 1 + random.below(140), data.length());
  loop.stride = std::max(random.pick(kStrides), kWidth);
  return loop;
}

// A lane's part of a loop. Each element is loaded somewhere between the loop's begin and the
// element's visit.
void run_loop(Machine& machine, Elements<>& data, fw::cursor<uint64_t>& cursor, const Loop& loop,
              Random& random) {
  std::map<uint32_t, uint32_t> operations;
  const auto visit = [&](uint64_t i, uint64_t value) {
    if (value == 0 && !machine.faulty()) scheduler.fail("a load failed without a fault");
    const auto found = operations.find(uint32_t(i));
    if (found == operations.end()) {
      scheduler.fail("a loop visits element " + std::to_string(i) + " twice, or without a reason");
    }
    data.end(found->second, uint32_t(i), value);
    operations.erase(found);
  };
  const uint32_t lane = fw::warp::lane();
  if (loop.way == Loop::kLoad || loop.way == Loop::kScattered) {
    constexpr uint32_t kCount = 4;
    const uint32_t first = loop.begin + (loop.way == Loop::kLoad ? lane : random.below(100));
    if (first + (kCount - 1) * loop.stride >= data.length()) return;
    // More than once, so that the cursor holds lines that others want.
    for (uint32_t n = 0; n < 4; ++n) {
      uint64_t values[kCount];
      for (uint32_t k = 0; k < kCount; ++k) {
        const uint32_t i = first + k * loop.stride;
        operations[i] = data.begin(i, false, 0);
      }
      cursor.load(first, loop.stride, values);
      for (uint32_t k = 0; k < kCount; ++k) visit(first + k * loop.stride, values[k]);
    }
    return;
  }
  for (uint32_t i = loop.begin + lane; i < loop.end; i += kWidth) {
    operations[i] = data.begin(i, false, 0);
  }
  fw::range<uint64_t> range(data.array(), loop.begin + lane, loop.end, kWidth);
  if (loop.way == Loop::kRange) {
    for (auto at = range.begin(); at != range.end(); ++at) visit(at.index(), *at);
  } else if (loop.way == Loop::kRangeEach) {
    range.each(visit);
  } else {
    fw::warp::each(data.array(), loop.begin, loop.end, visit);
  }
  if (!operations.empty()) scheduler.fail("a loop has left out elements");
}

// More lines than the frames of one set. Where data is copied, reads fail in some of the runs.
Shape one_crowded_set(Run& run, uint32_t percent_with_faults) {
  Shape shape;
  shape.lines = 6;
  shape.depth_log2 = 2;
  shape.path = run.random.chance(50) ? fw::nvme::kInPlace : fw::nvme::kBounce;
  shape.warps = kWidth == 32 ? 2 : 4;
  if (!run.faults_given && shape.path == fw::nvme::kBounce &&
      run.random.chance(percent_with_faults)) {
    run.faults.errors = 40;
  }
  return shape;
}

}  // namespace

FW_SCENARIO(elements, "loads, stores, prefetches and cursors on a cache of a few frames") {
  const Shape shape = Shape::draw(run.random);
  use_elements(run, shape, kWidth == 1 ? 1 + run.random.below(5) : 1 + run.random.below(2));
}

FW_SCENARIO(faults, "the same over disks that fail, wait, tear and stop") {
  const Shape shape = Shape::draw(run.random);
  draw_faults(run);
  use_elements(run, shape, kWidth == 1 ? 1 + run.random.below(4) : 1);
}

FW_SCENARIO(cursors, "loads of several elements at a time by some, while others load and store") {
  Machine machine(run, one_crowded_set(run, 20));
  Elements<> data(machine, 0);
  machine.launch([&](Thread& t) {
    fw::cursor<uint64_t> cursor(data.array());
    uint32_t i = data.pick(t.random);
    for (uint32_t n = 0; n < (kWidth == 1 ? 8 : 3); ++n) {
      // Half of the time on the line that the cursor has found.
      if (t.random.chance(50)) i = data.pick(t.random);
      const uint32_t dice = t.random.below(100);
      if (dice < 45) {
        load_several(machine, data, cursor, i, t.random);
      } else if (dice < 90) {
        data.load_by(i, "load through a cursor", [&](uint32_t j) { return cursor[j]; });
      } else {
        data.store(data.pick(t.random));
      }
    }
  });
  data.check();
  machine.settle();
}

FW_SCENARIO(loops, "loops over elements in order, side by side, while others store") {
  Machine machine(run, one_crowded_set(run, 20));
  Elements<> data(machine, 0);
  constexpr uint32_t kLoops = kWidth == 1 ? 4 : 2;
  std::vector<Loop> loops;  // the lanes of a warp run the same
  for (uint32_t n = 0; n < machine.shape().warps * kLoops; ++n) {
    loops.push_back(draw_loop(data, run.random));
  }
  machine.launch([&](Thread& t) {
    fw::cursor<uint64_t> cursor(data.array());
    for (uint32_t n = 0; n < kLoops; ++n) {
      run_loop(machine, data, cursor, loops[t.warp * kLoops + n], t.random);
      if (t.random.chance(20)) data.store(data.pick(t.random));
    }
  });
  data.check();
  machine.settle();
}

FW_SCENARIO(emptied, "warps load and store lines in place that another flushes and empties") {
  Shape shape;
  shape.lines = 2;
  shape.warps = 3;
  shape.plain = true;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  const fw::kernels::maintenance_params p = machine.maintenance(0);
  constexpr uint32_t kTurns = 3;
  // The lanes of a warp want the same line, as by the shortcut of a miss.
  std::vector<uint32_t> firsts;
  for (uint32_t n = 0; n < shape.warps * kTurns; ++n) firsts.push_back(64 * run.random.below(2));
  machine.launch([&](Thread& t) {
    if (t.warp == 0) {
      become(t.lane, kWidth);
      for (uint32_t n = 0; n < kTurns; ++n) {
        fw::warp::sync(fw::warp::kFullMask);
        fw_flush_lines(p);
        fw::warp::sync(fw::warp::kFullMask);
        fw_invalidate_lines(p);
      }
      return;
    }
    for (uint32_t n = 0; n < kTurns; ++n) {
      // The last line is partial.
      const uint32_t i = std::min(firsts[t.warp * kTurns + n] + t.lane, data.length() - 1);
      if (t.warp == 1 && n != 1) {
        data.store(i);
      } else {
        data.load(i);
      }
    }
  });
  data.check();
  machine.settle();
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

FW_SCENARIO(evict, "loads of more lines than one set holds, some of which fail") {
  Machine machine(run, one_crowded_set(run, 60));
  Elements<> data(machine, 0);
  const uint32_t operations = kWidth == 1 ? 6 : 2;
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t i = data.pick(t.random);
      switch (t.random.below(4)) {
        case 0:
          data.prefetch(i);
          break;
        case 1:
          data.load_by(i, "load slowly",
                       [&](uint32_t j) { return load_slowly(data.array(), j, t.random); });
          break;
        case 2:
          data.load_by(i, "load after a miss",
                       [&](uint32_t j) { return data.array().load_slow(j, true); });
          break;
        default:
          data.load(i);
      }
    }
  });
  data.check();
  machine.settle();
}

FW_SCENARIO(foreign,
            "every frame belongs to prefetches of another array, whose threads have ended") {
  Shape shape;
  shape.volumes = 2;
  shape.depth_log2 = 3;
  shape.queues = 1 + run.random.below(2);
  shape.path = run.random.chance(50) ? fw::nvme::kInPlace : fw::nvme::kBounce;
  Machine machine(run, shape);
  Elements<> ours(machine, 0);
  Elements<> theirs(machine, 1);
  auto* flag = machine.allocate<uint32_t>(1, "flag", Sharing::kAtomic);
  machine.launch([&](Thread& t) {
    if (t.warp == 0) {
      for (uint32_t line = 0; line < 4; ++line) theirs.prefetch(line * 64 + t.lane);
      fw::atomic::store_release(flag, 1u);
      return;
    }
    while (fw::atomic::load_acquire(flag) == 0) fw::base::pause(fw::nvme::kBackOffNs);
    ours.load(ours.pick(t.random));
  });
  ours.check();
  theirs.check();
  machine.settle();
}
