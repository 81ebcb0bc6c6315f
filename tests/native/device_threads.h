// What the stress programs of device threads share: their memory, queue pairs, controllers and
// turns.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/host_memory.h"
#include "flashwarp/array.cuh"
#include "nvme/software/software_controller.h"
#include "storage/memory_storage.h"

namespace fw::stress {

inline constexpr uint32_t kThreads = 4;
inline constexpr uint64_t kTimeoutNs = 60'000'000'000;

// Memory that a controller may reach besides its queues: addresses and bytes.
using Regions = std::vector<std::pair<uint64_t, uint64_t>>;

template <typename T>
uint64_t address(const T* p) {
  return reinterpret_cast<uint64_t>(p);
}

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
  q.data = {reinterpret_cast<uint64_t>(data), 0, line_bytes, kTimeoutNs, path, 0};
  if (path == nvme::kBounce) {
    const uint64_t size = uint64_t(depth) * line_bytes;
    q.data.buffers = address(arena.allocate<char>(size));
    regions.emplace_back(q.data.buffers, size);
  }
  q.depth_log2 = depth_log2;
  q.id = id;
  return {address(q.sq), address(q.cq), address(q.sq_doorbell), address(q.cq_doorbell), depth, id};
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
    controllers_.back()->start();
  }

  // All threads at once, each with the context of a device thread.
  void launch(const std::function<void(uint32_t)>& work) {
    std::vector<std::thread> threads;
    for (auto& each : controllers_) each->launch_begins();
    for (uint32_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        base::this_thread = {i, kThreads, &serve, this};
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

  std::vector<std::unique_ptr<native::Controller>> controllers_;
};

// Takes turns until FLASHWARP_STRESS_SECONDS (default 5) have passed, and one at least. Prints the
// seed; the first argument of the program replays one.
inline int take_turns(int count, char** arguments, const char* of_what,
                      const std::function<void(uint32_t turn, std::mt19937& random)>& turn_of) {
  const uint32_t seed = count > 1 ? uint32_t(std::atoi(arguments[1])) : std::random_device()();
  const char* text = std::getenv("FLASHWARP_STRESS_SECONDS");
  const double budget = text != nullptr ? std::atof(text) : 5.0;
  std::printf("seed %u\n", seed);
  std::fflush(stdout);
  std::mt19937 random(seed);
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  uint32_t turn = 0;
  for (; turn == 0 || spent() < budget; ++turn) turn_of(turn, random);
  std::printf("%u %s in %.1f s\n", turn, of_what, spent());
  return EXIT_SUCCESS;
}

}  // namespace fw::stress
