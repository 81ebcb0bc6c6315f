// The sizes of a machine and its faults: drawn for each run, or chosen by a scenario.
#pragma once

#include "flashwarp/array.cuh"
#include "random.h"
#include "run.h"

namespace fw::simulator {

inline constexpr uint32_t kWidth = base::kWarpWidth;
inline constexpr uint32_t kLineShift = 9;
inline constexpr uint32_t kLineBytes = 1u << kLineShift;

struct Shape {
  uint32_t sets = 1;
  uint32_t ways = 4;  // a multiple of four: the width of a probe
  uint32_t volumes = 1;
  uint32_t lines = 6;  // of each volume; the last one is partial
  uint32_t queues = 1;
  uint32_t depth_log2 = 1;
  nvme::route path = nvme::kInPlace;
  uint32_t controllers = 1;
  uint32_t warps = 2;
  cache::spread spread = cache::kOneNamespace;
  uint32_t namespaces = 1;  // of each volume, each with `queues` queues
  uint32_t stripe_lines = 1;
  uint32_t tier_ways = 0;  // of each subset of the host tier
  uint32_t tier_subsets = 1;
  uint32_t first_deeper = 0;  // the rings of namespace 0 have this many times two as many entries
  bool leased = false;        // kInPlace: the pages may be left while kernels run
  bool plain = false;         // kInPlace: reads, and writes without a lease, take no commands
  bool streamed = false;      // kInPlace: warps read storage that others write, and look again
  // With `plain`: reads look each line up among the parts of the namespace.
  bool parts = false;
  int bad = -1;  // the one namespace that faults are for; -1: all

  static Shape draw(Random& random) {
    Shape s;
    constexpr uint32_t kSets[] = {1, 1, 2, 3};
    constexpr nvme::route kPaths[] = {nvme::kInPlace, nvme::kBounce, nvme::kDirect};
    constexpr uint32_t kLines[] = {2, 5, 6, 9, 12};
    s.sets = random.pick(kSets);
    s.volumes = 1 + random.below(2);
    s.lines = random.pick(kLines);
    s.queues = 1 + random.below(2);
    s.depth_log2 = 1 + random.below(3);
    s.path = random.pick(kPaths);
    s.plain = random.chance(40);
    // No draw: seeds give the runs that they gave.
    s.parts = s.plain && s.lines > 9;
    s.controllers = 1 + random.chance(20);
    s.warps = 2 + random.below(kWidth == 32 ? 1 : 3);
    return s;
  }
};

// Faults after which a reader still gets an answer; or a controller that stops, for a while or for
// good. When it resumes, its late transfers must not hit frames of other lines.
inline Faults draw_faults(Run& run) {
  if (run.faults_given) return run.faults;
  Random& random = run.random;
  Faults f;
  constexpr uint32_t kErrors[] = {0, 3, 20, 60};
  f.errors = random.pick(kErrors);
  f.torn = random.chance(50) ? 30 : 0;
  f.wait = random.chance(70) ? 60 : 0;
  f.delay = random.chance(70) ? 1 + random.below(30) : 0;
  f.coalesce = random.chance(30) ? 1 + random.below(8) : 0;
  if (random.chance(15)) {
    f.stop_after = 1 + random.below(60);
    f.stop_for = random.chance(50) ? 0 : 1 + random.below(200);
  }
  run.faults = f;
  return f;
}

}  // namespace fw::simulator
