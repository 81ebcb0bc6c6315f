// For the sanitizers: device threads on one small cache load, store, prefetch and use cursors.
//
// Two arrays share a cache of a few frames and rings of a few entries, so nearly every access
// evicts, writes back or waits. Each element has one thread that stores to it, and its value names
// the element and a version. A reader checks that the value belongs to the element, is no older
// than the last store that had finished, and never goes backwards. Each round ends with a flush,
// after which the storage must have every last value. FLASHWARP_STRESS_SECONDS is the budget
// (default 5).
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "device_threads.h"
#include "flashwarp/cache/read_around.cuh"

using namespace fw::stress;
namespace cache = fw::cache;
namespace nvme = fw::nvme;

namespace {

constexpr uint32_t kArrays = 2;

struct Geometry {
  uint32_t line_bytes;
  uint32_t sets;
  uint32_t ways;
  uint32_t queues;
  uint32_t depth_log2;
  uint32_t path;
  uint32_t controller_threads;
  uint32_t elements;  // of each array
  bool controllers_yield;
  cache::spread spread = cache::kOneNamespace;
  uint32_t namespaces = 1;
  uint32_t stripe_lines = 1;
  uint32_t tier_ways = 0;
  uint32_t tier_subsets = 1;
  bool plain = false;  // in place without commands
};

void print(FILE* to, const Geometry& g) {
  std::fprintf(to,
               "line %u, %u sets of %u, %u queues of %u, path %u%s, %u threads%s, %u elements, "
               "spread %u over %u, stripes of %u, tier of %u * %u\n",
               g.line_bytes, g.sets, g.ways, g.queues, 1u << g.depth_log2, g.path,
               g.plain ? " without commands" : "", g.controller_threads,
               g.controllers_yield ? " that yield" : "", g.elements, g.spread, g.namespaces,
               g.stripe_lines, g.tier_subsets, g.tier_ways);
}

const Geometry* running = nullptr;

[[noreturn]] void fail(const char* what, uint64_t element, uint64_t got, uint64_t expected) {
  std::fprintf(stderr, "failed: %s: element %llu holds %#llx, not %#llx\n", what,
               (unsigned long long)element, (unsigned long long)got, (unsigned long long)expected);
  if (running != nullptr) print(stderr, *running);
  std::abort();
}

// One array: its namespaces, and its volume of the cache.
struct Volume {
  std::vector<uint64_t*> data;
  cache::volume* entry = nullptr;
  fw::array<uint64_t> array = {};
  // Versions that the writer of an element has finished storing.
  std::unique_ptr<std::atomic<uint32_t>[]> finished;
};

uint64_t value_of(uint32_t array, uint64_t element, uint32_t version) {
  return uint64_t(array + 1) << 56 | element << 32 | version;
}

// Accesses of one element that are slow, so that other threads can evict the line meanwhile: a real
// access takes nanoseconds, in which a thread is seldom interrupted.
struct SlowLoad {
  static constexpr bool kStores = false;
  uint64_t offset;
  uint64_t value = 0;
  void visit(fw::lanes, fw::lanes, uint64_t frame) {
    std::this_thread::yield();
    value = fw::atomic::raw<8>::load(reinterpret_cast<const char*>(frame + offset));
  }
};
struct SlowStore {
  static constexpr bool kStores = true;
  uint64_t offset;
  uint64_t value;
  void visit(fw::lanes, fw::lanes, uint64_t frame) {
    std::this_thread::yield();
    fw::atomic::raw<8>::store(reinterpret_cast<char*>(frame + offset), value);
    std::this_thread::yield();
  }
};

template <typename Op>
void access(const fw::array<uint64_t>& a, uint64_t element, Op& op) {
  cache::tally tally;
  cache::access<fw::policy>({a.geometry, *a.cache, *a.volume, fw::warp::active()},
                            {a.line_of(element)}, op, tally);
  tally.add_to(*a.volume, fw::warp::active());
}

class Rig {
 public:
  explicit Rig(const Geometry& g) : g_(g) {
    cache_ = make_cache(arena_, g.sets, g.ways, g.line_bytes);
    const uint64_t places = uint64_t(g.sets) * g.tier_subsets * g.tier_ways;
    cache_->tier_ways = g.tier_ways;
    cache_->tier = {arena_.allocate<uint64_t>(places), arena_.allocate<char>(places * g.line_bytes),
                    g.tier_subsets, 0};
    for (uint32_t i = 0; i < kArrays; ++i) attach(i);
  }

  Controllers& controllers() { return controllers_; }

  // One thread's part of a round. `seen` has the latest version that this thread saw of each
  // element.
  void use(uint32_t thread, uint32_t operations, uint32_t seed) {
    std::mt19937 random(seed * kThreads + thread);
    std::vector<uint32_t> seen[kArrays];
    for (auto& versions : seen) versions.assign(g_.elements, 0);
    fw::cursor<uint64_t> cursors[kArrays] = {fw::cursor<uint64_t>(volumes_[0].array),
                                             fw::cursor<uint64_t>(volumes_[1].array)};
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t which = random() % kArrays;
      Volume& v = volumes_[which];
      const uint32_t element = random() % g_.elements;
      switch (random() % 8) {
        case 0:
        case 1:
        case 2: {
          const uint32_t mine = element - element % kThreads + thread;
          if (mine >= g_.elements) break;
          const uint32_t version = v.finished[mine].load(std::memory_order_relaxed) + 1;
          const uint64_t value = value_of(which, mine, version);
          if (random() % 4 == 0) {
            SlowStore op = {v.array.offset_of(mine), value};
            access(v.array, mine, op);
          } else {
            v.array.store(mine, value);
          }
          v.finished[mine].store(version, std::memory_order_release);
          break;
        }
        case 3:
          v.array.prefetch(element);
          break;
        case 4:
          for (uint32_t i = element; i < std::min(element + 20, g_.elements); ++i) {
            check(which, i, seen[which], [&] { return cursors[which][i]; });
          }
          break;
        case 5:
          check(which, element, seen[which], [&] {
            SlowLoad op = {v.array.offset_of(element)};
            access(v.array, element, op);
            return op.value;
          });
          break;
        case 6:
          if (random() % 2 == 0) {
            check_bundle<cache::piece>(which, element, seen[which], random);
          } else {
            check_bundle<cache::cells>(which, element, seen[which], random);
          }
          break;
        default:
          check(which, element, seen[which], [&] { return v.array[element]; });
      }
    }
  }

  // Flush, then the storage holds every last value.
  void settle() {
    for (Volume& v : volumes_) controllers_.flush(cache_, v.entry);
    for (uint32_t which = 0; which < kArrays; ++which) {
      Volume& v = volumes_[which];
      for (uint32_t i = 0; i < g_.elements; ++i) {
        const uint64_t expected = value_of(which, i, v.finished[i]);
        for (uint32_t r = 0; r < replicas(); ++r) {
          const uint64_t got = *stored(which, i, r);
          if (got != expected) fail("storage after flush", i, got, expected);
        }
      }
    }
    const uint64_t lines = uint64_t(g_.sets) * g_.ways;
    for (uint64_t way = 0; way < lines; ++way) {
      const uint64_t word = cache_->geometry.tags[way];
      if ((word & (cache::tag::kPinMask | cache::tag::kDirty | cache::tag::kWriting)) != 0 ||
          cache::tag::state_of(word) == cache::tag::kBusy) {
        fail("tag at rest", way, word, 0);
      }
    }
    const uint64_t places = uint64_t(g_.sets) * g_.tier_subsets * g_.tier_ways;
    for (uint64_t place = 0; place < places; ++place) {
      const uint64_t state = cache::tier::state_of(cache_->tier.tags[place]);
      if (state != cache::tier::kEmpty && state != cache::tier::kHeld) {
        fail("place at rest", place, cache_->tier.tags[place], 0);
      }
    }
  }

  // Empties the cache, so that the next round begins cold.
  void invalidate() {
    for (Volume& v : volumes_) {
      fw::kernels::maintenance_params p = {};
      p.cache = cache_;
      p.volume = v.entry;
      controllers_.launch([&](uint32_t) { fw_invalidate_lines(p); });
      controllers_.launch([&](uint32_t) { fw_drop_tier(p); });
    }
  }

 private:
  template <typename Load>
  void check(uint32_t which, uint32_t element, std::vector<uint32_t>& seen, Load load) {
    const uint32_t finished = volumes_[which].finished[element].load(std::memory_order_acquire);
    check_value(which, element, finished, seen, load());
  }

  void check_value(uint32_t which, uint32_t element, uint32_t finished, std::vector<uint32_t>& seen,
                   uint64_t got) {
    const uint32_t version = uint32_t(got);
    const uint64_t oldest = value_of(which, element, std::max(finished, seen[element]));
    if (got >> 32 != oldest >> 32) fail("a value of another place", element, got, oldest);
    if (version < uint32_t(oldest)) fail("an old value", element, got, oldest);
    seen[element] = version;
  }

  // Reads elements in a bundle, as gathers do: out of frames, and around the cache. Of a piece one,
  // or each second one of some in a line.
  template <typename Piece>
  void check_bundle(uint32_t which, uint32_t first, std::vector<uint32_t>& seen,
                    std::mt19937& random) {
    using reader = cache::piece_reader<fw::policy, Piece>;
    constexpr bool kCells = std::is_same_v<Piece, cache::cells>;
    constexpr uint32_t kMost = kCells ? 4 : 1;
    const fw::array<uint64_t>& a = volumes_[which].array;
    Piece pieces[reader::kBundle];
    uint64_t values[reader::kBundle][kMost];
    uint32_t elements[reader::kBundle];
    uint32_t cells[reader::kBundle];
    uint32_t finished[reader::kBundle][kMost];
    const uint32_t count = 1 + random() % reader::kBundle;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t begin = i == 0 ? first : random() % g_.elements;
      elements[i] = begin;
      for (uint32_t& n = cells[i] = 0; n < kMost; ++n) {
        const uint32_t element = begin + 2 * n;
        if (element >= g_.elements || a.line_of(element) != a.line_of(begin)) break;
        finished[i][n] = volumes_[which].finished[element].load(std::memory_order_acquire);
      }
      const cache::piece piece = {a.line_of(begin), a.offset_of(begin), 8 * uint64_t(cells[i]),
                                  address(values[i])};
      if constexpr (kCells) {
        pieces[i] = {piece, cells[i], 8, 16};
      } else {
        pieces[i] = piece;
      }
    }
    cache::tally tally;
    reader around(a.geometry, *a.volume, cache::around::kAll);
    const uint32_t rest = around.read(pieces, count, tally);
    tally.add_to(*a.volume, fw::warp::active());
    for (uint32_t i = 0; i < count; ++i) {
      for (uint32_t n = 0; n < cells[i]; ++n) {
        const uint32_t element = elements[i] + 2 * n;
        if (((rest >> i) & 1) == 0) {
          check_value(which, element, finished[i][n], seen, values[i][n]);
        } else {
          check(which, element, seen, [&] { return a[element]; });
        }
      }
    }
  }

  uint32_t replicas() const { return g_.spread == cache::kReplicated ? g_.namespaces : 1; }

  // Where a namespace holds an element. Of stripes only one does; of replicas each.
  uint64_t* stored(uint32_t number, uint64_t element, uint32_t replica) {
    const uint64_t per_line = g_.line_bytes / 8;
    const uint64_t line = element / per_line;
    uint64_t there = line;
    uint32_t n = replica;
    if (g_.spread == cache::kStriped) {
      const uint64_t stripe = line / g_.stripe_lines;
      n = uint32_t(stripe % g_.namespaces);
      there = stripe / g_.namespaces * g_.stripe_lines + line % g_.stripe_lines;
    }
    return volumes_[number].data[n] + there * per_line + element % per_line;
  }

  void attach(uint32_t number) {
    Volume& v = volumes_[number];
    const uint64_t bytes = uint64_t(g_.elements) * 8;
    v.finished = std::make_unique<std::atomic<uint32_t>[]>(g_.elements);
    v.entry = attach_volume(arena_, cache_, bytes, g_.namespaces * g_.queues, g_.path);
    cache::volume& entry = *v.entry;
    entry.spread = g_.spread;
    entry.stripe_lines = g_.stripe_lines;
    if (g_.spread != cache::kOneNamespace) {
      entry.replica_writes = arena_.allocate<uint32_t>(uint64_t(g_.sets) * g_.ways);
    }
    entry.namespace_count = g_.namespaces;
    // Stripes of whole lines; else the last line is as partial as the array's.
    const uint64_t rows = entry.line_count / g_.stripe_lines / g_.namespaces + 1;
    const uint64_t part =
        g_.spread == cache::kStriped ? rows * g_.stripe_lines * g_.line_bytes : bytes;
    for (uint32_t n = 0; n < g_.namespaces; ++n) {
      v.data.push_back(arena_.allocate<uint64_t>(part / 8));
      entry.spans[n] = {n * g_.queues, g_.queues};
    }
    for (uint32_t i = 0; i < g_.elements; ++i) {
      for (uint32_t r = 0; r < replicas(); ++r) *stored(number, i, r) = value_of(number, i, 0);
    }
    for (uint32_t n = 0; n < g_.namespaces; ++n) {
      serve_namespace(v.data[n], part, entry.queues + n * g_.queues);
    }
    v.array = {cache_->geometry, cache_, v.entry, entry.line_begin, g_.elements};
  }

  // Queue pairs and a controller for one namespace.
  void serve_namespace(uint64_t* data, uint64_t bytes, nvme::queue_pair* queues) {
    std::vector<fw::native::QueuePairAddresses> pairs;
    Regions regions;
    if (g_.path == nvme::kDirect) {
      regions.emplace_back(address(cache_->geometry.frames),
                           uint64_t(g_.sets) * g_.ways * g_.line_bytes);
    }
    for (uint32_t i = 0; i < g_.queues; ++i) {
      pairs.push_back(make_queue_pair(arena_, queues[i], uint16_t(i + 1), g_.depth_log2, data,
                                      g_.line_bytes, g_.path, regions));
      queues[i].plain_reads = queues[i].plain_writes = g_.plain;
    }
    fw::native::ControllerOptions options;
    options.threads = g_.controller_threads;
    options.yields = g_.controllers_yield;
    controllers_.start(data, bytes, pairs, regions, options);
  }

  const Geometry g_;
  Arena arena_;
  cache::line_cache* cache_ = nullptr;
  Volume volumes_[kArrays];
  Controllers controllers_;
};

// Stripes or replicas, two times of three.
void choose_spread(Geometry& g, uint32_t turn, std::mt19937& random) {
  g.spread = cache::spread(turn % 3);
  g.namespaces = g.spread == cache::kOneNamespace ? 1 : 2 + random() % 2;
  g.stripe_lines = 1 + random() % 3;
  g.tier_ways = random() % 4;
  g.tier_subsets = 1 + random() % 2;
}

// The hardest first: one set of four ways, rings of two entries.
Geometry choose(uint32_t turn, std::mt19937& random) {
  // On the direct route the controller stores to frames while readers look at them, which is what
  // their second look at the tag is for; to ThreadSanitizer a memcpy there is a race.
  const uint32_t paths = FW_TSAN ? 2 : 3;
  Geometry g = {512, 1, 4, 1, 1, turn % paths, turn / paths % 3, 1000, random() % 2 == 1};
  g.plain = g.path == nvme::kInPlace && random() % 2 == 1;
  if (turn < 3 * paths) return g;
  if (turn < 6 * paths) {
    choose_spread(g, 1 + random() % 2, random);
    return g;
  }
  g.line_bytes = 512u << random() % 4;
  g.sets = 1 + random() % 5;
  g.ways = 4u << random() % 3;
  g.queues = 1 + random() % 3;
  g.depth_log2 = 1 + random() % 3;
  // Not a whole number of lines: the last one is partial.
  g.elements = 100 + random() % (g.line_bytes / 8 * g.sets * g.ways * 3);
  choose_spread(g, turn, random);
  return g;
}

}  // namespace

int main(int count, char** arguments) {
  return take_turns(count, arguments, "geometries", [](uint32_t turn, std::mt19937& random) {
    const Geometry g = choose(turn, random);
    running = &g;
    Rig rig(g);
    for (uint32_t round = 0; round < 3; ++round) {
      const uint32_t round_seed = uint32_t(random());
      rig.controllers().launch(
          [&](uint32_t thread) { rig.use(thread, FW_TSAN ? 1000 : 4000, round_seed); });
      rig.settle();
      if (round == 1) rig.invalidate();
    }
    running = nullptr;
  });
}
