// What the stress programs of device threads share: their memory, queue pairs and controllers.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/host_memory.h"
#include "flashwarp/array.cuh"
#include "flashwarp/kernels/maintenance.cuh"
#include "nvme/software/software_controller.h"
#include "storage/memory_storage.h"
#include "turns.h"

namespace fw::stress {

inline constexpr uint32_t kThreads = 4;
inline constexpr uint64_t kTimeoutNs = 60'000'000'000;

// Memory that a controller may reach besides its queues: addresses and bytes.
using Regions = std::vector<std::pair<uint64_t, uint64_t>>;

// Zero-filled memory that is freed at the end.
class Arena {
 public:
  template <typename T>
  T* allocate(uint64_t count) {
    return static_cast<T*>(blocks_.emplace_back(count * sizeof(T), 4096).address());
  }

 private:
  std::deque<native::HostMemory> blocks_;
};

// Makes `q` a queue pair over `data`, and returns its addresses for the controller. Adds bounce
// buffers to `regions`.
inline native::QueuePairAddresses make_queue_pair(Arena& arena, nvme::queue_pair& q, uint16_t id,
                                                  uint32_t depth_log2, const void* data,
                                                  uint32_t line_bytes, uint32_t path,
                                                  Regions& regions) {
  const uint32_t depth = 1u << depth_log2;
  auto* bells = arena.allocate<uint32_t>(32);
  q.sq = arena.allocate<nvme::command>(depth);
  q.cq = arena.allocate<nvme::completion>(depth);
  q.sq_doorbell = bells;
  q.cq_doorbell = bells + 16;
  q.slots = arena.allocate<uint64_t>(depth);
  q.detached = arena.allocate<nvme::detached_command>(depth);
  q.data = {reinterpret_cast<uint64_t>(data), 0, line_bytes, kTimeoutNs, path, 0, nullptr};
  if (path == nvme::kBounce) {
    const uint64_t size = uint64_t(depth) * line_bytes;
    q.data.buffers = address(arena.allocate<char>(size));
    regions.emplace_back(q.data.buffers, size);
  }
  q.cached_reads = path == nvme::kDirect;
  q.depth_log2 = depth_log2;
  q.id = id;
  return {address(q.sq), address(q.cq), address(q.sq_doorbell), address(q.cq_doorbell), depth, id};
}

// A cache of empty frames. Policies' words follow the tags: half as long, after up to a memory line
// of nothing.
inline cache::line_cache* make_cache(Arena& arena, uint32_t sets, uint32_t ways,
                                     uint32_t line_bytes) {
  const uint64_t lines = uint64_t(sets) * ways;
  auto* c = arena.allocate<cache::line_cache>(1);
  c->geometry.tags = arena.allocate<uint64_t>(lines + 16 + lines / 2);
  c->geometry.frames = arena.allocate<char>(lines * line_bytes);
  c->geometry.set_count = sets;
  c->geometry.set_reciprocal = sets > 1 ? ~uint64_t(0) / sets + 1 : 0;
  c->geometry.ways = ways;
  c->geometry.line_shift = uint32_t(__builtin_ctz(line_bytes));
  c->set_control = arena.allocate<uint32_t>(sets);
  c->volumes = arena.allocate<cache::volume>(cache::kVolumesMax);
  c->page_bytes = 2 << 20;
  return c;
}

// Attaches the next array of a cache: so many bytes in one namespace, whose queue pairs the caller
// makes.
inline cache::volume* attach_volume(Arena& arena, cache::line_cache* c, uint64_t bytes,
                                    uint32_t queue_count, uint32_t path) {
  cache::volume* v = &c->volumes[c->volume_end];
  *v = {};
  if (c->volume_end != 0) v->line_begin = v[-1].line_begin + v[-1].line_count;
  v->line_count = (bytes + (1u << c->geometry.line_shift) - 1) >> c->geometry.line_shift;
  v->bytes = bytes;
  v->queues = arena.allocate<nvme::queue_pair>(queue_count);
  v->queue_count = queue_count;
  v->events = arena.allocate<cache::counters>(cache::kCounterShards);
  v->errors = arena.allocate<cache::error_record>(1);
  v->path = path;
  v->spread = cache::kOneNamespace;
  v->stripe_lines = 1;
  v->namespace_count = 1;
  v->spans[0] = {0, queue_count};
  v->attached = 1;
  c->volume_end++;
  return v;
}

// The controllers of a cache, and device threads that wait for them and serve them.
class Controllers {
 public:
  ~Controllers() {
    for (auto& each : controllers_) each->stop();
  }

  void start(void* data, uint64_t bytes, const std::vector<native::QueuePairAddresses>& pairs,
             const Regions& regions, const native::ControllerOptions& options) {
    controllers_.push_back(std::make_unique<native::SoftwareController>(
        std::make_shared<native::MemoryStorage>(data, bytes, true), pairs, regions, options));
    for (const native::QueuePairAddresses& pair : pairs) data_of_[pair.sq] = data;
    // `launch` tells all controllers.
    controllers_.back()->hear_launches(true);
    controllers_.back()->start();
  }

  // Writes back what is dirty, and waits for it: the storage then holds every last value.
  void flush(cache::line_cache* c, cache::volume* v) {
    kernels::maintenance_params p = {};
    p.cache = c;
    p.volume = v;
    p.line_begin = v->line_begin;
    p.line_end = v->line_begin + v->line_count;
    p.opcode = nvme::kFlush;
    launch([&](uint32_t) { fw_flush_lines(p); });
    launch([&](uint32_t) { fw_submit_command(p); });
    launch([&](uint32_t) { fw_quiesce(p); });
    require(v->commands.noted == 0 && v->indices.noted == 0, "no command failed");
  }

  // All threads at once, each with the context of a device thread.
  void launch(const std::function<void(uint32_t)>& work) {
    std::vector<std::thread> threads;
    for (auto& each : controllers_) each->launch_begins();
    for (uint32_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        base::this_thread = {i, kThreads, &serve, this};
        base::this_thread.find = &find;
        base::this_thread.find_argument = this;
        work(i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& each : controllers_) each->launch_ends();
  }

 private:
  static int serve(void* self) {
    int moved = 0;
    for (auto& each : static_cast<Controllers*>(self)->controllers_) {
      moved += each->serve_some(0);
    }
    return moved;
  }

  // Copies words out of the namespaces, to frames and to callers, slowly, so that other threads can
  // store to a line that was absent, and write it back, meanwhile. What has changed during the copy
  // is torn: a value that no thread has stored takes its place. Some copies are not made, as those
  // of pages that have gone: their targets are undefined.
  static base::host_source find(void* self, const void* sq) {
    const auto& data_of = static_cast<Controllers*>(self)->data_of_;
    const auto found = data_of.find(address(sq));
    if (found == data_of.end()) return {};
    return {&copy, &has, found->second};
  }
  static void copy(void* data, base::host_copy* copies, uint32_t count) {
    for (bool again : {false, true}) {
      for (uint32_t i = 0; i < count; ++i) {
        if (i % 4 == 0) std::this_thread::yield();
        const uint64_t bytes = copies[i].bytes;
        for (uint64_t k = 0; k < copies[i].count * bytes; k += 8) {
          const uint64_t at = k / bytes * copies[i].stride + k % bytes;
          const char* from = static_cast<const char*>(data) + copies[i].offset + at;
          auto* to = reinterpret_cast<uint64_t*>(copies[i].target + k);
          const uint64_t value = atomic::raw<8>::load(from);
          // Relaxed atomic: readers of a frame may look at it while it is filled.
          const bool torn = again && value != atomic::load_relaxed(to);
          atomic::store_relaxed(to, torn ? ~uint64_t(0) : value);
        }
        if (again) copies[i].done = ++copies_ % 4 != 0;
      }
    }
  }
  static bool has(void*, uint64_t, uint64_t) { return true; }
  static inline thread_local uint32_t copies_ = 0;

  std::map<uint64_t, void*> data_of_;  // by the address of an SQ
  std::vector<std::unique_ptr<native::Controller>> controllers_;
};

}  // namespace fw::stress
