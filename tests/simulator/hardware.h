// The parts of a machine: a cache in shared memory, its volumes, their queues, controllers and
// disks. They are the real structures and queue servers, laid out by a `Shape`. Nothing runs here.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "disk.h"
#include "flashwarp/array.cuh"
#include "memory.h"
#include "nvme/software/queue_server.h"
#include "run.h"
#include "scheduler.h"
#include "shape.h"
#include "transitions.h"

namespace fw::simulator {

class Hardware {
 public:
  Hardware(Run& run, const Shape& shape) : run_(run), shape_(shape) {
    const uint64_t ways = uint64_t(shape.sets) * shape.ways;
    // Before the tags, where the geometry has them.
    constexpr uint64_t kHead = cache::kPolicyWordsAlignment / sizeof(uint64_t);
    uint64_t* refusals = allocate<uint64_t>(kHead, "policy_refusals", Sharing::kAtomic);
    Region tags = {"tags", nullptr, ways * 8};
    tags.describe = &describe_tag;
    tags.check = &check_tag;
    tags.owner = &tag_rules_;
    cache_ = {};
    cache_.geometry.tags = reinterpret_cast<uint64_t*>(memory.allocate(tags));
    // Behind the tags, where the geometry has them.
    uint32_t* words = nullptr;
    if (cache::keeps_words<policy>()) {
      words = allocate<uint32_t>(ways, "policy_words", Sharing::kAtomic);
    }
    cache_.set_control = allocate<uint32_t>(shape.sets, "set_control", Sharing::kAtomic);
    cache_.geometry.frames = allocate<char>(ways * kLineBytes, "frames", Sharing::kRacy);
    cache_.volumes = allocate<cache::volume>(cache::kVolumesMax, "volumes", Sharing::kAtomic, 4);
    cache_.geometry.set_count = shape.sets;
    cache_.geometry.set_reciprocal = shape.sets > 1 ? ~uint64_t(0) / shape.sets + 1 : 0;
    cache_.geometry.ways = shape.ways;
    cache_.geometry.line_shift = kLineShift;
    cache_.page_bytes = 2 << 20;
    if (words != nullptr && words != cache::policy_word(cache_.geometry, 0)) {
      throw Failure("the policy's words are not where the geometry has them\n");
    }
    if (refusals + kHead - 1 != cache::policy_refusals(cache_.geometry)) {
      throw Failure("the policy's refusals are not where the geometry has them\n");
    }
    attach_tier();
    uint64_t begin = 0;
    for (uint32_t v = 0; v < shape.volumes; ++v) begin = attach(v, begin);
    if (run.faults.stop_after != 0 || run.faults.suspend_after != 0) let_time_pass();
  }
  Hardware(const Hardware&) = delete;
  Hardware& operator=(const Hardware&) = delete;

  // The bound of a wait, where time passes: short, so that controllers which stop do not cost many
  // points; longer than any schedule starves a thread where no wait may run out.
  static constexpr uint64_t kTimeoutNs = 20'000;
  static constexpr uint64_t kFairTimeoutNs = 50'000'000;
  uint64_t timeout_ns() const { return may_time_out() ? kTimeoutNs : kFairTimeoutNs; }

  const Shape& shape() const { return shape_; }
  cache::line_cache& line_cache() { return cache_; }
  const cache::line_cache& line_cache() const { return cache_; }
  cache::volume& volume(uint32_t v = 0) { return *volumes_[v].entry; }
  const cache::volume& volume(uint32_t v = 0) const { return *volumes_[v].entry; }
  // Where the device finds a namespace in place, while its lease holds.
  char* pages(uint32_t v, uint32_t n) { return volumes_[v].namespaces[n].pages; }
  char* storage(uint32_t v = 0, uint32_t n = 0) { return volumes_[v].namespaces[n].data; }
  // Where a namespace holds a byte of the volume. Of stripes only one does; of replicas each.
  char* stored(uint32_t v, uint64_t byte, uint32_t replica = 0) const {
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
  // Places in the host tier.
  uint64_t tier_places() const {
    return uint64_t(shape_.sets) * shape_.tier_subsets * shape_.tier_ways;
  }
  // Commands that the controller has completed on a queue of a volume.
  uint64_t completed(uint32_t v, uint32_t queue) const {
    const Namespace& ns = volumes_[v].namespaces[queue / shape_.queues];
    uint64_t sum = 0;
    for (const auto& counter : ns.servers[queue % shape_.queues]->counters().commands) {
      sum += counter.get();
    }
    return sum;
  }
  uint32_t replicas() const { return shape_.spread == cache::kReplicated ? shape_.namespaces : 1; }
  uint64_t storage_bytes() const {
    return uint64_t(shape_.lines - 1) * kLineBytes + kLineBytes / 2;
  }
  // Bytes of each namespace: a volume of stripes fills the last ones in part.
  uint64_t namespace_bytes() const {
    if (shape_.spread != cache::kStriped) return storage_bytes();
    const uint64_t stripes = (shape_.lines + shape_.stripe_lines - 1) / shape_.stripe_lines;
    const uint64_t rows = (stripes + shape_.namespaces - 1) / shape_.namespaces;
    return rows * shape_.stripe_lines * kLineBytes;
  }
  template <typename T>
  fw::array<T> array(uint32_t v = 0) {
    return {cache_.geometry, &cache_, volumes_[v].entry, volumes_[v].entry->line_begin,
            storage_bytes() / sizeof(T)};
  }
  // Whether accesses may fail in this run.
  bool faulty() const { return !spared_ && (run_.faults.errors != 0 || may_time_out()); }
  // Whether waits may have no end but their time limit.
  bool may_time_out() const { return run_.faults.stop_after != 0 || run_.faults.loses_host(); }
  // Whether only commands fail that another replica answers, so that no access may fail.
  void spare_accesses() { spared_ = true; }
  // Whether a controller was given up: nothing on its queues can be expected any more. Or a wait
  // for a line of replicas, which is marked apart: flushes of the volume do not wait any more.
  bool timed_out() const {
    for (const Volume& v : volumes_) {
      if (v.entry->failed != 0) return true;
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

 protected:
  struct Namespace {
    char* data = nullptr;
    char* pages = nullptr;  // where the device reads in place, or null
    std::shared_ptr<Disk> disk;
    std::unique_ptr<native::ControllerContext> context;
    std::vector<std::unique_ptr<native::QueueServer>> servers;
  };
  struct Volume {
    cache::volume* entry = nullptr;
    std::vector<Namespace> namespaces;
    uint32_t serving = 0;  // controllers that are at its queues
    bool closed = false;
  };

  Run& run_;
  const Shape shape_;
  std::vector<Volume> volumes_;
  TagRules tag_rules_{&cache_};
  uint32_t* heartbeat_ = nullptr;  // where time passes

 private:
  template <typename T>
  static uint64_t address(const T* p) {
    return reinterpret_cast<uint64_t>(p);
  }

  void let_time_pass() {
    scheduler.let_time_pass(true);
    heartbeat_ = allocate<uint32_t>(1, "heartbeat", Sharing::kAtomic);
    *heartbeat_ = 1;
    for (Volume& v : volumes_) {
      for (uint32_t q = 0; q < v.entry->queue_count; ++q) {
        v.entry->queues[q].data.timeout_ns = timeout_ns();
        v.entry->queues[q].data.heartbeat = heartbeat_;
      }
    }
  }

  void attach_tier() {
    if (shape_.tier_ways == 0) return;
    Region tags = {"tier", nullptr, tier_places() * 8};
    tags.describe = &describe_place;
    tags.check = &check_place;
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
    if (shape_.leased) v.entry->lease = allocate<cache::lease>(1, "lease", Sharing::kAtomic);
    v.entry->attached = 1;
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

  // A read that was given up may run late, beside a write of the same block, which was read from
  // another replica meanwhile. Its data is not used. A write that was given up keeps its line from
  // being written again, so two writes never run beside each other.
  static bool has_given_up(const void* entry) {
    const auto& v = *static_cast<const cache::volume*>(entry);
    for (uint32_t q = 0; q < v.queue_count; ++q) {
      if (v.queues[q].failed != 0) return true;
    }
    return false;
  }

  // Divides a namespace within its first line, and within a later one.
  void read_in_parts(nvme::queue_pair& q, uint64_t bytes) {
    const uint64_t ends[] = {8, 24, kLineBytes, kLineBytes * 3 / 2, bytes};
    auto* parts = allocate<nvme::namespace_part>(5, "parts");
    for (uint32_t i = 0; i < 5; ++i) parts[i] = {ends[i], q.data.mapped_base};
    q.parts = parts;
    q.part_count = 5;
    q.plain_reads = 0;
  }

  void attach_namespace(uint32_t number, uint32_t index, nvme::queue_pair* queues) {
    Namespace& ns = volumes_[number].namespaces.emplace_back();
    const uint64_t bytes = namespace_bytes();
    const uint32_t depth_log2 = shape_.depth_log2 + (index == 0 ? shape_.first_deeper : 0);
    const uint32_t depth = 1u << depth_log2;
    const bool good = shape_.bad >= 0 && uint32_t(shape_.bad) != index;
    const Faults faults = good ? Faults{} : run_.faults;
    Region storage = {"storage", nullptr, bytes};
    storage.sharing = shape_.streamed ? Sharing::kRacy : Sharing::kChecked;
    storage.volume = attaching_;
    storage.owner = volumes_[number].entry;
    storage.forgives_controllers = &has_given_up;
    ns.data = memory.allocate(storage);
    if (shape_.path == nvme::kInPlace) {
      ns.pages = shape_.leased ? allocate<char>(bytes, "pages", Sharing::kRacy) : ns.data;
    }
    ns.disk =
        std::make_shared<Disk>(ns.data, bytes, ns.pages, faults, run_.seed + number + 10 * index);
    std::vector<std::pair<uint64_t, uint64_t>> regions;
    if (shape_.path == nvme::kDirect) {
      regions.emplace_back(address(cache_.geometry.frames),
                           uint64_t(shape_.sets) * shape_.ways * kLineBytes);
    }
    std::vector<native::QueuePairAddresses> pairs;
    for (uint32_t i = 0; i < shape_.queues; ++i) {
      nvme::queue_pair& q = queues[i];
      Region doorbells = {"doorbells", nullptr, 64 * sizeof(uint32_t), 4, 4};
      doorbells.check = &check_doorbell;
      doorbells.owner = &q;
      doorbells.volume = attaching_;
      auto* bells = reinterpret_cast<uint32_t*>(memory.allocate(doorbells));
      q.sq = allocate<nvme::command>(depth, "sq");
      Region cq = {"cq", nullptr, depth * sizeof(nvme::completion), sizeof(nvme::completion)};
      cq.keeps_loads = true;
      cq.volume = attaching_;
      q.cq = reinterpret_cast<const nvme::completion*>(memory.allocate(cq));
      q.sq_doorbell = bells;
      q.cq_doorbell = bells + kCqDoorbell;
      Region slots = {"slots", nullptr, depth * 8};
      slots.describe = &describe_slot;
      slots.check = &check_slot;
      slots.owner = &q;
      slots.volume = attaching_;
      q.slots = reinterpret_cast<uint64_t*>(memory.allocate(slots));
      q.detached = allocate<nvme::detached_command>(depth, "detached");
      // A wait is bounded by a time that no run reaches unless a controller stops.
      q.data = {address(ns.pages), 0, kLineBytes, uint64_t(1) << 60, shape_.path, shape_.leased};
      if (shape_.path == nvme::kBounce || shape_.leased) {
        const uint64_t size = uint64_t(depth) * kLineBytes;
        q.data.buffers = address(allocate<char>(size, "buffers"));
        regions.emplace_back(q.data.buffers, size);
      }
      q.plain_reads = shape_.plain;
      q.plain_writes = shape_.plain && !shape_.leased;
      const bool divided = shape_.parts && shape_.plain && bytes > 2 * kLineBytes;
      if (divided) read_in_parts(q, bytes);
      q.depth_log2 = depth_log2;
      q.id = i + 1;
      pairs.push_back({address(q.sq), address(q.cq), address(q.sq_doorbell), address(q.cq_doorbell),
                       depth, uint16_t(i + 1), 0});
    }
    ns.context.reset(new native::ControllerContext{
        ns.disk, native::DmaRegions(regions), 2 << 20, uint64_t(64) << 10, {}});
    const bool waits = run_.faults.wait != 0;
    for (const auto& pair : pairs) {
      ns.servers.push_back(std::make_unique<native::QueueServer>(
          pair, *ns.context, waits ? std::make_unique<DiskEngine>(*ns.disk) : nullptr));
    }
  }

  cache::line_cache cache_;
  int attaching_ = -1;
  bool spared_ = false;
};

}  // namespace fw::simulator
