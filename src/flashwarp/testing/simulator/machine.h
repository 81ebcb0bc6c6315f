// A device with a page cache, its volumes, their controllers and disks, inside the simulator.
//
// Built by a scenario for each run, with the real structures, headers and queue servers. `launch`
// runs device threads beside the controllers; then the machine flushes and checks what must hold
// at rest. What must hold at all times is checked at every change of a tag or a slot.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "disk.h"
#include "flashwarp/kernels/gather.cuh"
#include "flashwarp/kernels/maintenance.cuh"
#include "history.h"
#include "hostile.h"
#include "queue_server.h"
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
  nvme::data_path path = nvme::kMapped;
  uint32_t controllers = 1;
  uint32_t warps = 2;
  cache::spread spread = cache::kOneNamespace;
  uint32_t namespaces = 1;  // of each volume, each with `queues` queues
  uint32_t stripe_lines = 1;
  uint32_t tier_ways = 0;  // of each subset of the host tier
  uint32_t tier_subsets = 1;
  uint32_t first_deeper = 0;  // the rings of namespace 0 have this many times two as many entries
  int bad = -1;               // the one namespace that faults are for; -1: all

  static Shape draw(Random& random) {
    Shape s;
    constexpr uint32_t kSets[] = {1, 1, 2, 3};
    constexpr nvme::data_path kPaths[] = {nvme::kMapped, nvme::kBounce, nvme::kDirect};
    constexpr uint32_t kLines[] = {2, 5, 6, 9, 12};
    s.sets = random.pick(kSets);
    s.volumes = 1 + random.below(2);
    s.lines = random.pick(kLines);
    s.queues = 1 + random.below(2);
    s.depth_log2 = 1 + random.below(3);
    s.path = random.pick(kPaths);
    s.controllers = 1 + random.chance(20);
    s.warps = 2 + random.below(kWidth == 32 ? 1 : 3);
    return s;
  }
};

// Faults that a waiting reader can still expect an answer from, or a controller that stops, for a
// while or for good. What it moves when it goes on again must not meet anybody else's line.
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

// One device thread of a launch.
struct Thread {
  uint32_t index;
  uint32_t lane;
  uint32_t warp;
  Random random;
};

// Makes the calling thread the `index`-th of `count`, for kernels that divide their work by that.
inline void become(uint32_t index, uint32_t count) {
  here->index = index;
  here->count = count;
}

class Machine {
 public:
  Machine(Run& run, const Shape& shape) : run_(run), shape_(shape) {
    const uint64_t ways = uint64_t(shape.sets) * shape.ways;
    Region tags = {"tags", nullptr, ways * 8};
    tags.describe = &describe_tag;
    tags.check = &check_tag;
    tags.owner = this;
    cache_ = {};
    cache_.shape.tags = reinterpret_cast<uint64_t*>(memory.allocate(tags));
    // Behind the tags, where the geometry has them.
    uint32_t* words = nullptr;
    if (cache::keeps_words<policy>()) {
      words = allocate<uint32_t>(ways, "policy_words", Sharing::kAtomic);
    }
    cache_.set_control = allocate<uint32_t>(shape.sets, "set_control", Sharing::kAtomic);
    cache_.shape.frames = allocate<char>(ways * kLineBytes, "frames", Sharing::kRacy);
    cache_.volumes = allocate<cache::volume>(cache::kVolumesMax, "volumes", Sharing::kAtomic, 4);
    cache_.shape.set_count = shape.sets;
    cache_.shape.set_reciprocal = shape.sets > 1 ? ~uint64_t(0) / shape.sets + 1 : 0;
    cache_.shape.ways = shape.ways;
    cache_.shape.line_shift = kLineShift;
    cache_.page_bytes = 2 << 20;
    require(words == nullptr || words == cache::policy_word(cache_.shape, 0), "words elsewhere");
    attach_tier();
    uint64_t begin = 0;
    for (uint32_t v = 0; v < shape.volumes; ++v) begin = attach(v, begin);
    if (run.faults.stop_after != 0) {
      scheduler.let_time_pass(true);
      for (Volume& v : volumes_) {
        for (uint32_t q = 0; q < v.entry->queue_count; ++q) {
          v.entry->queues[q].data.timeout_ns = 20'000;
        }
      }
    }
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  const Shape& shape() const { return shape_; }
  cache::page_cache& page_cache() { return cache_; }
  cache::volume& volume(uint32_t v = 0) { return *volumes_[v].entry; }
  char* storage(uint32_t v = 0) { return volumes_[v].namespaces[0].data; }
  // Where a namespace holds a byte of the volume. Of stripes only one does; of replicas each.
  char* stored(uint32_t v, uint64_t byte, uint32_t replica = 0) {
    const uint64_t line = byte >> kLineShift;
    uint64_t there = line;
    uint32_t n = replica;
    if (shape_.spread == cache::kStriped) {
      const uint64_t stripe = line / shape_.stripe_lines;
      n = uint32_t(stripe % shape_.namespaces);
      there = stripe / shape_.namespaces * shape_.stripe_lines + line % shape_.stripe_lines;
    }
    return volumes_[v].namespaces[n].data + (there << kLineShift) + byte % kLineBytes;
  }
  uint32_t replicas() const { return shape_.spread == cache::kReplicated ? shape_.namespaces : 1; }
  uint64_t storage_bytes() const {
    return uint64_t(shape_.lines - 1) * kLineBytes + kLineBytes / 2;
  }
  template <typename T>
  fw::array<T> array(uint32_t v = 0) {
    return {cache_.shape, &cache_, volumes_[v].entry, volumes_[v].entry->line_begin,
            storage_bytes() / sizeof(T)};
  }
  // Whether accesses may fail in this run.
  bool faulty() const {
    return !spared_ && (run_.faults.errors != 0 || run_.faults.stop_after != 0);
  }
  // What fails are commands that another replica answers: no access may.
  void spare_accesses() { spared_ = true; }
  // Whether a controller was given up: nothing on its queues can be expected any more.
  bool timed_out() const {
    for (const Volume& v : volumes_) {
      for (uint32_t q = 0; q < v.entry->queue_count; ++q) {
        if (v.entry->queues[q].failed != 0) return true;
      }
    }
    return false;
  }

  // Zero-filled memory that device threads may share.
  template <typename T>
  T* allocate(uint64_t count, const char* name, Sharing sharing = Sharing::kChecked,
              uint32_t cell_bytes = 0) {
    Region region = {name, nullptr, count * sizeof(T)};
    region.element_bytes = sizeof(T) == 1 ? 8 : uint32_t(sizeof(T));
    region.cell_bytes = cell_bytes != 0 ? cell_bytes : sizeof(T) == 4 ? 4 : 8;
    region.sharing = sharing;
    region.volume = attaching_;
    return reinterpret_cast<T*>(memory.allocate(region));
  }

  // Runs `work` on all device threads of the shape, or of `warps` warps.
  void launch(const std::function<void(Thread&)>& work, uint32_t warps = 0) {
    ++launches_;
    const uint32_t count = (warps != 0 ? warps : shape_.warps) * kWidth;
    scheduler.launch(
        count, kWidth,
        [&](uint32_t index) {
          Thread thread = {index, index % kWidth, index / kWidth,
                           Random(run_.seed, 1000 * launches_ + index)};
          work(thread);
        },
        shape_.controllers, [&](uint32_t index) { serve(index); });
  }

  // What a scenario wants to be checked at rest, after the storage is up to date.
  void at_rest(std::function<void()> check) { checks_.push_back(std::move(check)); }

  // Flushes, waits for silence, and checks the machine.
  void settle() {
    scheduler.calm(true);
    for (Volume& v : volumes_) {
      for (Namespace& n : v.namespaces) n.disk->heal();
    }
    healed_ = true;
    if (timed_out()) return check_timeouts();
    for (uint32_t v = 0; v < shape_.volumes; ++v) {
      kernels::maintenance_params p = maintenance(v);
      launch([&](Thread&) { fw_flush_lines(p); }, 1);
      launch([&](Thread&) { fw_quiesce(p); }, 1);
    }
    check_rest();
    for (const auto& check : checks_) check();
    scheduler.calm(false);
    healed_ = false;
  }

  // Empties the cache of a volume.
  void invalidate(uint32_t v, bool drop = false) {
    scheduler.calm(true);
    may_drop_ = drop;
    kernels::maintenance_params p = maintenance(v);
    p.drop = drop;
    launch([&](Thread&) { fw_invalidate_lines(p); }, 1);
    if (shape_.tier_ways != 0) launch([&](Thread&) { fw_drop_tier(p); }, 1);
    may_drop_ = false;
    scheduler.calm(false);
  }

  kernels::maintenance_params maintenance(uint32_t v) {
    kernels::maintenance_params p = {};
    p.cache = &cache_;
    p.volume = volumes_[v].entry;
    p.line_begin = p.volume->line_begin;
    p.line_end = p.line_begin + p.volume->line_count;
    p.opcode = nvme::kFlush;
    return p;
  }

 private:
  struct Namespace {
    char* data = nullptr;
    std::shared_ptr<Disk> disk;
    std::unique_ptr<native::ControllerContext> context;
    std::vector<std::unique_ptr<native::QueueServer>> servers;
  };
  struct Volume {
    cache::volume* entry = nullptr;
    std::vector<Namespace> namespaces;
  };

  template <typename T>
  static uint64_t address(const T* p) {
    return reinterpret_cast<uint64_t>(p);
  }

  uint64_t tier_places() const {
    return uint64_t(shape_.sets) * shape_.tier_subsets * shape_.tier_ways;
  }

  void attach_tier() {
    if (shape_.tier_ways == 0) return;
    Region tags = {"tier", nullptr, tier_places() * 8};
    tags.describe = &describe_place;
    tags.check = &check_place;
    tags.owner = this;
    cache_.tier_ways = shape_.tier_ways;
    cache_.tier.subsets = shape_.tier_subsets;
    cache_.tier.tags = reinterpret_cast<uint64_t*>(memory.allocate(tags));
    // Frames race with their readers; the tier's never do.
    cache_.tier.frames = allocate<char>(tier_places() * kLineBytes, "tier frames");
  }

  uint64_t attach(uint32_t number, uint64_t line_begin) {
    Volume& v = volumes_.emplace_back();
    attaching_ = int(number);
    const bool several = shape_.spread != cache::kOneNamespace;
    const uint32_t namespaces = several ? shape_.namespaces : 1;
    const uint32_t queue_count = namespaces * shape_.queues;
    auto* queues = allocate<nvme::queue_pair>(queue_count, "queue", Sharing::kChecked, 4);
    v.entry = &cache_.volumes[number];
    cache_.volume_end = number + 1;
    *v.entry = {};
    for (uint32_t n = 0; n < namespaces; ++n) {
      attach_namespace(number, n, queues + n * shape_.queues);
      if (several) v.entry->spans[n] = {n * shape_.queues, shape_.queues};
    }
    v.entry->line_begin = line_begin;
    v.entry->line_count = shape_.lines;
    v.entry->bytes = storage_bytes();
    v.entry->queues = queues;
    v.entry->events =
        allocate<cache::counters>(cache::kCounterShards, "counters", Sharing::kAtomic);
    v.entry->errors = allocate<cache::error_record>(1, "errors");
    v.entry->queue_count = queue_count;
    v.entry->path = shape_.path;
    v.entry->spread = shape_.spread;
    if (several) {
      v.entry->stripe_lines = shape_.stripe_lines;
      v.entry->namespace_count = namespaces;
      v.entry->replica_writes = allocate<uint32_t>(uint64_t(shape_.sets) * shape_.ways,
                                                   "replica_writes", Sharing::kAtomic);
    }
    attaching_ = -1;
    return line_begin + shape_.lines;
  }

  // Bytes of each namespace: a volume of stripes fills the last ones in part.
  uint64_t namespace_bytes() const {
    if (shape_.spread != cache::kStriped) return storage_bytes();
    const uint64_t stripes = (shape_.lines + shape_.stripe_lines - 1) / shape_.stripe_lines;
    const uint64_t rows = (stripes + shape_.namespaces - 1) / shape_.namespaces;
    return rows * shape_.stripe_lines * kLineBytes;
  }

  void attach_namespace(uint32_t number, uint32_t index, nvme::queue_pair* queues) {
    Namespace& ns = volumes_[number].namespaces.emplace_back();
    const uint64_t bytes = namespace_bytes();
    const uint32_t depth_log2 = shape_.depth_log2 + (index == 0 ? shape_.first_deeper : 0);
    const uint32_t depth = 1u << depth_log2;
    const bool good = shape_.bad >= 0 && uint32_t(shape_.bad) != index;
    const Faults faults = good ? Faults{} : run_.faults;
    ns.data = allocate<char>(bytes, "storage");
    ns.disk = std::make_shared<Disk>(ns.data, bytes, shape_.path == nvme::kMapped, faults,
                                     run_.seed + number + 10 * index);
    std::vector<std::pair<uint64_t, uint64_t>> regions;
    if (shape_.path == nvme::kDirect) {
      regions.emplace_back(address(cache_.shape.frames),
                           uint64_t(shape_.sets) * shape_.ways * kLineBytes);
    }
    std::vector<native::QueuePairAddresses> pairs;
    for (uint32_t i = 0; i < shape_.queues; ++i) {
      nvme::queue_pair& q = queues[i];
      auto* bells = allocate<uint32_t>(64, "doorbells", Sharing::kAtomic);
      q.sq = allocate<nvme::command>(depth, "sq");
      q.cq = allocate<nvme::completion>(depth, "cq", Sharing::kAtomic, 8);
      q.sq_doorbell = bells;
      q.cq_doorbell = bells + 32;
      Region slots = {"slots", nullptr, depth * 8};
      slots.describe = &describe_slot;
      slots.check = &check_slot;
      slots.owner = &q;
      slots.volume = attaching_;
      q.slots = reinterpret_cast<uint64_t*>(memory.allocate(slots));
      q.detached = allocate<nvme::detached_command>(depth, "detached");
      // A wait is bounded by a time that no run reaches unless a controller stops.
      q.data = {address(ns.data), 0, kLineBytes, uint64_t(1) << 60, shape_.path, 0};
      if (shape_.path == nvme::kBounce) {
        const uint64_t size = uint64_t(depth) * kLineBytes;
        q.data.buffers = address(allocate<char>(size, "buffers"));
        regions.emplace_back(q.data.buffers, size);
      }
      q.depth_log2 = depth_log2;
      q.id = i + 1;
      pairs.push_back({address(q.sq), address(q.cq), address(q.sq_doorbell), address(q.cq_doorbell),
                       depth, uint16_t(i + 1)});
    }
    ns.context.reset(new native::ControllerContext{
        ns.disk, native::DmaRegions(regions), 2 << 20, uint64_t(64) << 10, {}});
    const bool waits = run_.faults.wait != 0;
    for (const auto& pair : pairs) {
      ns.servers.push_back(std::make_unique<native::QueueServer>(
          pair, *ns.context, waits ? std::make_unique<DiskEngine>(*ns.disk) : nullptr));
    }
  }

  // A controller thread.
  void serve(uint32_t index) {
    Random random(run_.seed, 500 + index);
    const Faults& faults = run_.faults;
    while (!scheduler.stopping()) {
      ++sweeps_;
      const bool stopped = faults.stop_after != 0 && !healed_ && sweeps_ > faults.stop_after &&
                           (faults.stop_for == 0 || sweeps_ < faults.stop_after + faults.stop_for);
      if (stopped && shape_.bad < 0) {
        if (faults.stop_for == 0) {
          scheduler.pause(0);
        } else {
          scheduler.yield();
        }
        continue;
      }
      const bool looks_away = faults.coalesce != 0 && random.below(faults.coalesce + 1) != 0;
      uint32_t moved = 0;
      bool in_flight = false;
      for (Volume& v : volumes_) {
        for (uint32_t n = 0; n < v.namespaces.size(); ++n) {
          if (stopped && n == uint32_t(shape_.bad)) continue;
          auto& servers = v.namespaces[n].servers;
          const uint32_t first = random.below(uint32_t(servers.size()));
          for (uint32_t i = 0; i < servers.size() && !looks_away; ++i) {
            native::QueueServer& server = *servers[(first + i) % servers.size()];
            if (server.has_work(0)) moved += server.serve();
            in_flight = in_flight || server.has_in_flight();
          }
        }
      }
      if (moved != 0) continue;
      if (looks_away || in_flight) {
        scheduler.yield();
      } else {
        scheduler.pause(0);
      }
    }
  }

  // At rest.

  void require(bool condition, const std::string& what) {
    if (!condition) throw Failure("at rest: " + what + "\n");
  }

  void check_timeouts() {
    // Another replica may have had what one did not answer.
    bool recorded = replicas() > 1;
    for (const Volume& v : volumes_) recorded = recorded || v.entry->errors->count != 0;
    require(recorded, "a wait ran out of time and no error record says so");
  }

  void check_rest() {
    for (uint64_t way = 0; way < cache_.shape.set_count * cache_.shape.ways; ++way) check_way(way);
    for (uint64_t place = 0; place < tier_places(); ++place) check_tier(place);
    for (uint64_t set = 0; set < cache_.shape.set_count; ++set) {
      require((cache_.set_control[set] & cache::kSetLocked) == 0, "a set is locked");
    }
    require(cache_.refusals == 0 || std::is_same_v<policy, hostile_policy>,
            "a policy chose a line that it may not have");
    for (uint32_t v = 0; v < shape_.volumes; ++v) {
      const Volume& volume = volumes_[v];
      if (!faulty()) require(volume.entry->errors->count == 0, "an error record without a fault");
      for (uint32_t i = 0; i < volume.entry->queue_count; ++i) check_queue(v, i);
    }
  }

  void check_way(uint64_t way) {
    const uint64_t word = cache_.shape.tags[way];
    const std::string name = "tags[" + std::to_string(way) + "] = " + describe_tag(word);
    const uint64_t moving = cache::tag::kPinMask | cache::tag::kDirty | cache::tag::kWriting;
    require(cache::tag::state_of(word) != cache::tag::kBusy && (word & moving) == 0, name);
    if (cache::tag::state_of(word) != cache::tag::kValid) return;
    const uint64_t line = cache::tag::line_of(word);
    require(cache::set_of(cache_.shape, line) == way / cache_.shape.ways,
            name + " is in another line's set");
    const cache::volume& owner = cache::volume_of(cache_, line);
    require_stored(owner, line, cache::frame_of(cache_.shape, way), name);
  }

  void require_stored(const cache::volume& owner, uint64_t line, const char* held,
                      const std::string& name) {
    const uint64_t bytes = cache::bytes_of_line(cache_, owner, line);
    for (uint32_t r = 0; r < replicas(); ++r) {
      const char* there =
          stored(uint32_t(&owner - cache_.volumes), (line - owner.line_begin) << kLineShift, r);
      require(std::memcmp(held, there, bytes) == 0, name + " differs from the storage");
    }
  }

  // A place in the tier: a line of the right subset, as the storage has it, and in no frame.
  void check_tier(uint64_t place) {
    namespace tier = cache::tier;
    const uint64_t word = cache_.tier.tags[place];
    const uint64_t state = tier::state_of(word);
    const std::string name = "tier[" + std::to_string(place) + "] = " + describe_place(word);
    require(state == tier::kEmpty || state == tier::kHeld, name);
    if (state == tier::kEmpty) return;
    const uint64_t line = tier::line_of(word);
    const uint64_t set = cache::set_of(cache_.shape, line);
    const uint64_t subset = line / shape_.sets % shape_.tier_subsets;
    require(place / shape_.tier_ways == set * shape_.tier_subsets + subset,
            name + " is in another line's subset");
    for (uint32_t way = 0; way < shape_.ways; ++way) {
      const uint64_t other = cache_.shape.tags[set * shape_.ways + way];
      require(
          cache::tag::state_of(other) == cache::tag::kInvalid || cache::tag::line_of(other) != line,
          name + " is in a frame too");
    }
    for (uint64_t other = 0; other < place; ++other) {
      const uint64_t earlier = cache_.tier.tags[other];
      require(tier::state_of(earlier) == tier::kEmpty || tier::line_of(earlier) != line,
              name + " is there twice");
    }
    require_stored(cache::volume_of(cache_, line), line,
                   tier::frame_of(cache_.tier, kLineShift, uint32_t(place)), name);
  }

  void check_queue(uint32_t v, uint32_t number) {
    const Volume& volume = volumes_[v];
    const nvme::queue_pair& q = volume.entry->queues[number];
    const uint32_t depth = 1u << q.depth_log2;
    const std::string name =
        "volume " + std::to_string(v) + " queue " + std::to_string(number) + ": ";
    uint64_t completed = 0;
    const Namespace& ns = volume.namespaces[number / shape_.queues];
    for (const auto& counter : ns.servers[number % shape_.queues]->counters().commands) {
      completed += counter.get();
    }
    require(completed == q.ticket, name + std::to_string(q.ticket) + " submitted, " +
                                       std::to_string(completed) + " completed");
    require(q.head == q.ticket && q.tail == q.ticket, name + "head, tail and ticket differ");
    require(*q.sq_doorbell == q.ticket % depth, name + "the SQ doorbell is elsewhere");
    require(*q.cq_doorbell == q.ticket % depth, name + "the CQ doorbell is elsewhere");
    require(q.publish_lock == 0 && q.drain_lock == 0, name + "a lock is held");
    for (uint32_t e = 0; e < depth; ++e) {
      const uint32_t turns = q.ticket / depth + (e < q.ticket % depth ? 1 : 0);
      require(q.slots[e] == nvme::slot::word(turns, nvme::slot::kFree),
              name + "slots[" + std::to_string(e) + "] = " + describe_slot(q.slots[e]));
    }
  }

  // At all times.

  static std::string describe_tag(uint64_t word) {
    constexpr const char* kStates[] = {"INVALID", "BUSY", "VALID", "?"};
    std::string text = kStates[word >> 62];
    text += " line " + std::to_string(cache::tag::line_of(word)) + " generation " +
            std::to_string((word & cache::tag::kGenerationMask) >> cache::tag::kLineBits);
    const uint64_t pins = (word & cache::tag::kPinMask) / cache::tag::kPinOne;
    if (pins != 0) text += " pins " + std::to_string(pins);
    if ((word & cache::tag::kReferenced) != 0) text += " referenced";
    if ((word & cache::tag::kDirty) != 0) text += " dirty";
    if ((word & cache::tag::kWriting) != 0) text += " writing";
    return text;
  }

  static std::string describe_slot(uint64_t word) {
    constexpr const char* kPhases[] = {"FREE", "WRITTEN", "DONE", "?"};
    std::string text =
        std::string(kPhases[word & nvme::slot::kPhaseMask]) + " turn " + std::to_string(word >> 32);
    if (nvme::slot::is_detached(word)) text += " detached";
    if (nvme::slot::status_of(word) != 0) {
      text += " status " + std::to_string(nvme::slot::status_of(word));
    }
    return text;
  }

  static void check_tag(void* owner, uint64_t way, uint64_t before, uint64_t after) {
    namespace tag = cache::tag;
    Machine& self = *static_cast<Machine*>(owner);
    const auto wrong = [&](const char* what) {
      scheduler.fail(std::string(what) + ": tags[" + std::to_string(way) + "] from " +
                     describe_tag(before) + " to " + describe_tag(after));
    };
    const uint64_t from = tag::state_of(before);
    const uint64_t to = tag::state_of(after);
    // A hit may mark a line that has just lost its frame: the mark means nothing there.
    if (((before ^ after) & ~tag::kReferenced) == 0) return;
    if (from == tag::kValid && to != tag::kValid) {
      if ((before & tag::kPinMask) != 0) wrong("a pinned line loses its frame");
      if ((before & tag::kWriting) != 0) wrong("a line loses its frame while it is written");
      if ((before & tag::kDirty) != 0 && !self.may_drop_) wrong("a dirty line is dropped");
    }
    if (from == tag::kBusy && to == tag::kBusy) wrong("two fills own a frame");
    if (from == tag::kInvalid && to == tag::kValid) wrong("a line appears without a fill");
    if (to == tag::kInvalid || tag::line_of(before) == tag::line_of(after)) return;
    const uint64_t first = way / self.cache_.shape.ways * self.cache_.shape.ways;
    for (uint64_t other = first; other < first + self.cache_.shape.ways; ++other) {
      const uint64_t word = self.cache_.shape.tags[other];
      if (other == way || tag::state_of(word) == tag::kInvalid) continue;
      if (tag::line_of(word) == tag::line_of(after)) wrong("two ways hold one line");
    }
  }

  static std::string describe_place(uint64_t word) {
    constexpr const char* kStates[] = {"EMPTY", "ENTERING", "HELD", "LEAVING"};
    return std::string(kStates[word >> 62]) + " line " +
           std::to_string(cache::tier::line_of(word)) + " stamp " +
           std::to_string(cache::tier::stamp_of(word));
  }

  static void check_place(void*, uint64_t place, uint64_t before, uint64_t after) {
    namespace tier = cache::tier;
    const uint64_t from = tier::state_of(before);
    const uint64_t to = tier::state_of(after);
    const bool goes_on = (from == tier::kEmpty && to == tier::kEntering) ||
                         (from == tier::kEntering && to == tier::kHeld) ||
                         (from == tier::kHeld && to != tier::kHeld) ||
                         (from == tier::kLeaving && to == tier::kEmpty);
    if (goes_on) return;
    scheduler.fail("tier[" + std::to_string(place) + "] from " + describe_place(before) + " to " +
                   describe_place(after));
  }

  static void check_slot(void* owner, uint64_t entry, uint64_t before, uint64_t after) {
    using namespace nvme;
    const auto& q = *static_cast<const queue_pair*>(owner);
    const uint64_t turn = before >> 32;
    const slot::phase from = slot::phase_of(before);
    const slot::phase to = slot::phase_of(after);
    const uint64_t next = next_turn(q, uint32_t(turn) << q.depth_log2);
    const bool goes_on = (from == slot::kFree && to == slot::kWritten && after >> 32 == turn) ||
                         (from == slot::kWritten && to == slot::kDone && after >> 32 == turn) ||
                         (from == slot::kDone && to == slot::kFree && after >> 32 == next);
    if (goes_on) return;
    scheduler.fail("slots[" + std::to_string(entry) + "] from " + describe_slot(before) + " to " +
                   describe_slot(after));
  }

  Run& run_;
  const Shape shape_;
  cache::page_cache cache_;
  std::vector<Volume> volumes_;
  std::vector<std::function<void()>> checks_;
  int attaching_ = -1;
  uint32_t launches_ = 0;
  uint32_t sweeps_ = 0;
  bool healed_ = false;
  bool may_drop_ = false;
  bool spared_ = false;
};

// The elements of one volume, with a history: every value names its place and its version.
template <typename T = uint64_t>
class Elements {
  static_assert(sizeof(T) == 8 || sizeof(T) == 4);

 public:
  Elements(Machine& machine, uint32_t volume)
      : machine_(machine),
        volume_(volume),
        array_(machine.array<T>(volume)),
        history_("volume " + std::to_string(volume)),
        versions_(array_.length, 0),
        initial_(array_.length, 0) {
    for (uint32_t r = 0; r < machine.replicas(); ++r) {
      for (uint32_t i = 0; i < array_.length; ++i) *stored(i, r) = value_of(i, 0);
    }
    machine.at_rest([this] { check_storage(); });
  }
  Elements(const Elements&) = delete;
  Elements& operator=(const Elements&) = delete;

  const fw::array<T>& array() const { return array_; }
  uint32_t length() const { return uint32_t(array_.length); }

  // An element of any line, at one of three places in it, so that threads meet.
  uint32_t pick(Random& random) const {
    constexpr uint32_t kPerLine = kLineBytes / sizeof(T);
    const uint32_t line = random.below(machine_.shape().lines);
    const uint32_t end = std::min((line + 1) * kPerLine, length());
    const uint32_t places[] = {line * kPerLine, line * kPerLine + 1, end - 1};
    return random.pick(places);
  }

  void load(uint32_t i) {
    load_by(i, "load", [&](uint32_t j) { return array_[j]; });
  }
  // Through any reader of one element.
  template <typename Read>
  void load_by(uint32_t i, const char* verb, Read read) {
    note(verb, i);
    const uint32_t operation = history_.begin(i, false, 0, first_value(i));
    const T value = read(i);
    // A failed transfer yields T(), which is nobody's value.
    if (value == T() && !machine_.faulty()) scheduler.fail("a load failed without a fault");
    history_.end(operation, value, value != T());
    check_owner(i, value);
  }
  // Returns the value stored.
  T store(uint32_t i) {
    // As array::store, which leaves the status to the host.
    return store_by(i, "store", [&](uint32_t j, T value) {
      detail::store_element<sizeof(T)> op = {array_.offset_of(j), value};
      return detail::access_slow(array_.cache, array_.volume, array_.line_of(j), op);
    });
  }
  // Through any writer of one element, which returns its status. Returns the value stored.
  template <typename Write>
  T store_by(uint32_t i, const char* verb, Write write) {
    note(verb, i);
    const T value = next_value(i);
    const uint32_t operation = history_.begin(i, true, value, first_value(i));
    const uint32_t status = write(i, value);
    if (status != nvme::kSuccess && !machine_.faulty()) {
      scheduler.fail("a store failed without a fault");
    }
    history_.end(operation, value, status == nvme::kSuccess);
    return value;
  }
  void prefetch(uint32_t i) {
    note("prefetch", i);
    array_.prefetch(i);
  }

  // The caller's part of a kernel that moves many at once.
  uint32_t begin(uint32_t i, bool is_store, T value) {
    return history_.begin(i, is_store, value, first_value(i), true);
  }
  void end(uint32_t operation, uint32_t i, T value) {
    check_owner(i, value);
    history_.end(operation, value, value != T());
  }
  T next_value(uint32_t i) { return value_of(i, ++versions_[i]); }
  void check_owner(uint32_t i, T value) const {
    if (value == T()) return;
    if ((value ^ value_of(i, 0)) >> kVersionBits != 0) {
      scheduler.fail("element " + std::to_string(i) + " of volume " + std::to_string(volume_) +
                     " yields a value of another place: " + std::to_string(value));
    }
  }
  // After each launch, before anything else.
  void check() { history_.check(); }

  // Between launches, at rest and with no line of ours cached: somebody else changes the storage.
  void restart() {
    history_.restart();
    for (uint32_t i = 0; i < length(); ++i) {
      initial_[i] = ++versions_[i];
      for (uint32_t r = 0; r < machine_.replicas(); ++r) {
        *stored(i, r) = value_of(i, initial_[i]);
      }
    }
  }

 private:
  static constexpr uint32_t kVersionBits = sizeof(T) == 8 ? 32 : 16;

  T value_of(uint32_t i, uint32_t version) const {
    const uint64_t place = uint64_t(volume_ + 1) << (sizeof(T) == 8 ? 24 : 12) | i;
    return T(place << kVersionBits | version);
  }
  T first_value(uint32_t i) const { return value_of(i, initial_[i]); }
  void note(const char* verb, uint32_t i) {
    scheduler.current()->doing =
        std::string(verb) + " " + std::to_string(volume_) + "[" + std::to_string(i) + "]";
  }
  T* stored(uint32_t i, uint32_t replica) const {
    return reinterpret_cast<T*>(machine_.stored(volume_, i * sizeof(T), replica));
  }
  void check_storage() {
    for (uint32_t r = 0; r < machine_.replicas(); ++r) {
      for (uint32_t i = 0; i < length(); ++i) {
        if (*stored(i, r) != *stored(i, 0)) scheduler.fail("replicas differ");
        check_owner(i, *stored(i, r));
      }
    }
    for (uint32_t i : history_.touched()) history_.settle(i, *stored(i, 0));
  }

  Machine& machine_;
  const uint32_t volume_;
  const fw::array<T> array_;
  History history_;
  std::vector<uint32_t> versions_;
  std::vector<uint32_t> initial_;  // versions that were in the storage before anybody stored
};

}  // namespace fw::simulator
