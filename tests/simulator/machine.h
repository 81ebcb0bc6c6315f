// A device with a cache, its volumes, their controllers and disks, inside the simulator.
//
// A scenario builds one for each run, with the real structures, headers and queue servers. `launch`
// runs device threads beside the controllers. Then the machine flushes and checks the invariants at
// rest (rest.h). Invariants that always hold are checked at every change of a tag or a slot.
#pragma once

#include <functional>
#include <vector>

#include "flashwarp/kernels/elements.cuh"
#include "flashwarp/kernels/maintenance.cuh"
#include "flashwarp/kernels/rows.cuh"
#include "flashwarp/kernels/stream.cuh"
#include "hardware.h"
#include "rest.h"

namespace fw::simulator {

// One device thread of a launch.
struct Thread {
  uint32_t index;
  uint32_t lane;
  uint32_t warp;
  Random random;
};

// Makes the calling thread the `index`-th of `count`, for kernels that divide their work by that.
// Its block has `warps` warps, and one of the launch's `barriers`.
inline void become(uint32_t index, uint32_t count, uint32_t warps = 1,
                   block_barrier* barriers = nullptr) {
  here->index = index;
  here->count = count;
  here->block_warps = warps;
  here->barrier = warps == 1 ? nullptr : barriers + index / kWidth / warps;
}

class Machine : public Hardware {
 public:
  using Hardware::Hardware;

  // Runs `work` on all device threads of the shape, or of `warps` warps. If `host` is set, runs it
  // on a host thread beside the controllers.
  void launch(const std::function<void(Thread&)>& work, uint32_t warps = 0,
              const std::function<void()>& host = nullptr) {
    ++launches_;
    const uint32_t count = (warps != 0 ? warps : shape_.warps) * kWidth;
    scheduler.launch(
        count, kWidth,
        [&](uint32_t index) {
          Thread thread = {index, index % kWidth, index / kWidth,
                           Random(run_.seed, 1000 * launches_ + index)};
          work(thread);
        },
        shape_.controllers + (host || beside_ ? 1 : 0),
        [&](uint32_t index) {
          if (index < shape_.controllers) return serve(index);
          if (host) return host();
          Random random(run_.seed, 700 + launches_);
          beside_(random);
        });
  }

  // What a host thread does beside the controllers during each launch; nothing: no such thread.
  void beside(std::function<void(Random&)> work) { beside_ = std::move(work); }

  // What a scenario wants to be checked at rest, after the storage is up to date.
  void at_rest(std::function<void()> check) { checks_.push_back(std::move(check)); }

  // Flushes, waits for silence, and checks the machine.
  void settle() {
    scheduler.calm(true);
    for (Volume& v : volumes_) {
      for (Namespace& n : v.namespaces) n.disk->heal();
    }
    healed_ = true;
    if (timed_out()) return rest::check_timeouts(*this);
    for (uint32_t v = 0; v < shape_.volumes; ++v) {
      if (volumes_[v].closed) continue;
      flush(v);
    }
    rest::check(*this);
    for (const auto& check : checks_) check();
    scheduler.calm(false);
    healed_ = false;
  }

  // Flushes a volume until no write of it fails: one may have failed before the storage was healed,
  // and a flush may have run out of time while the controllers stood still.
  void flush(uint32_t v) {
    constexpr int kFlushesMax = 4;
    kernels::maintenance_params p = maintenance(v);
    for (int flushes = 0; flushes < kFlushesMax; ++flushes) {
      const uint32_t before = failures(v);
      launch([&](Thread&) { fw_flush_lines(p); }, 1);
      launch([&](Thread&) { fw_quiesce(p); }, 1);
      if (failures(v) == before) return;
    }
  }

  // Failures of commands of a volume, noted or not.
  uint32_t failures(uint32_t v) const {
    const cache::failure_log& log = volumes_[v].entry->commands;
    return log.noted + log.untold;
  }

  // Empties the cache of a volume.
  void invalidate(uint32_t v, bool drop = false) {
    scheduler.calm(true);
    tag_rules_.may_drop = drop;
    kernels::maintenance_params p = maintenance(v);
    p.drop = drop;
    launch([&](Thread&) { fw_invalidate_lines(p); }, 1);
    if (shape_.tier_ways != 0) launch([&](Thread&) { fw_drop_tier(p); }, 1);
    tag_rules_.may_drop = false;
    scheduler.calm(false);
  }

  // Ends a volume without lines, as `Cache.withdraw`, the controller and the host's memory do. One
  // thread of a launch calls it while other threads use the other volumes.
  void close(uint32_t v) {
    Volume& closing = volumes_[v];
    atomic::store_relaxed(&closing.entry->attached, 0u);
    atomic::fence_sequential();
    while (atomic::load_acquire(&closing.entry->visitors) != 0) base::pause(nvme::kBackOffNs);
    closing.closed = true;
    while (closing.serving != 0) scheduler.yield();
    atomic::store_relaxed(&closing.entry->line_count, uint64_t(0));
    memory.unmap(int(v));
  }

  kernels::maintenance_params maintenance(uint32_t v) {
    kernels::maintenance_params p = {};
    p.cache = &line_cache();
    p.volume = &volume(v);
    p.line_begin = p.volume->line_begin;
    p.line_end = p.line_begin + p.volume->line_count;
    p.opcode = nvme::kFlush;
    return p;
  }

 private:
  // A controller thread.
  void serve(uint32_t index) {
    Random random(run_.seed, 500 + index);
    const Faults& faults = run_.faults;
    while (!scheduler.stopping()) {
      ++sweeps_;
      if (is_suspended()) {
        scheduler.pause(uint32_t(timeout_ns() / 64));
        continue;
      }
      if (index == 0) beat();
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
        if (v.closed) continue;
        ++v.serving;
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
        --v.serving;
      }
      if (moved != 0) continue;
      if (looks_away || in_flight) {
        scheduler.yield();
      } else {
        scheduler.pause(0);
      }
    }
  }

  // Whether nothing of the host's process runs now.
  bool is_suspended() {
    const Faults& faults = run_.faults;
    if (faults.suspend_after == 0 || healed_ || sweeps_ < faults.suspend_after) return false;
    if (suspended_until_ns_ == 0) suspended_until_ns_ = scheduler.clock_ns() + faults.suspend_ns;
    return faults.loses_host() || scheduler.clock_ns() < suspended_until_ns_;
  }

  // After a sweep, so that a thread that sees a beat has let the controller run. Not after each
  // sweep, because every store wakes fibres that nap.
  void beat() {
    if (heartbeat_ == nullptr || scheduler.clock_ns() < next_beat_ns_) return;
    next_beat_ns_ = scheduler.clock_ns() + timeout_ns() / 16;
    atomic::store_relaxed_system(heartbeat_, ++beats_);
  }

  std::vector<std::function<void()>> checks_;
  std::function<void(Random&)> beside_;
  uint32_t launches_ = 0;
  uint32_t sweeps_ = 0;
  uint32_t beats_ = 1;
  uint64_t next_beat_ns_ = 0;
  uint64_t suspended_until_ns_ = 0;
  bool healed_ = false;
};

}  // namespace fw::simulator
