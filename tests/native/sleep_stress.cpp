// For the sanitizers: threads of a controller that hears of all launches sleep without limit, and
// no command waits for ever.
//
// Launches begin and end at random moments, ring commands, and leave them to the controller's
// threads, which look once and sleep at once. A launch leaves its commands behind, or waits for
// them while others begin and end. What is rung between launches is followed by a wake. Another
// thread says now and then that the controller does not hear of all launches, and that it does
// again. One submitter alone is not saved by what others wake. A controller that is told nothing,
// as that of a GPU, is woken by the thread that looks at its doorbells. A completion that does not
// come within seconds is a wake-up that was lost. FLASHWARP_STRESS_SECONDS bounds the time.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "device_threads.h"

using namespace fw::stress;
namespace atomic = fw::atomic;
namespace nvme = fw::nvme;

namespace {

constexpr uint32_t kDepthLog2 = 3;
constexpr uint32_t kBytes = 1 << 16;

// A submitter with a ring of its own, one command at a time.
struct Submitter {
  nvme::queue_pair pair = {};
  uint32_t tail = 0, head = 0;
  uint16_t phase = 1;

  void ring(uint64_t memory) {
    nvme::command entry = {};
    entry.opcode_cid = nvme::kRead;
    entry.nsid = nvme::kNamespaceId;
    entry.prp1 = memory;
    atomic::store_plain(&pair.sq[tail], entry);
    tail = (tail + 1) % (1u << kDepthLog2);
    atomic::store_release(pair.sq_doorbell, tail);
  }

  void wait() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto* upper = reinterpret_cast<const uint64_t*>(&pair.cq[head]) + 1;
    while ((atomic::load_acquire(upper) >> 48 & 1) != phase) {
      require(std::chrono::steady_clock::now() < end, "no wake-up is lost");
      std::this_thread::yield();
    }
    head = (head + 1) % (1u << kDepthLog2);
    if (head == 0) phase ^= 1;
    atomic::store_release(pair.cq_doorbell, head);
  }
};

// Mostly for as long as a thread looks before it sleeps; a sleep would take longer.
void pause(std::mt19937_64& random) {
  const auto time = std::chrono::nanoseconds(random() >> (48 + random() % 12));
  if (random() % 64 == 0) return std::this_thread::sleep_for(time);
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

// Whether a controller hears of all launches, of most, or is told nothing.
enum class Told { kAll, kMost, kNothing };

void run(uint64_t seed, uint32_t threads, bool yields, Told told, double budget_s) {
  const uint32_t count = told == Told::kAll ? 1 : 2;
  alignas(4) static uint32_t heartbeat = 0;
  Arena arena;
  auto* data = arena.allocate<char>(kBytes);
  auto* targets = arena.allocate<char>(count * 4096);
  Regions regions = {{address(targets), count * 4096}};
  std::vector<Submitter> submitters(count);
  std::vector<fw::native::QueuePairAddresses> pairs;
  for (uint32_t i = 0; i < count; ++i) {
    pairs.push_back(make_queue_pair(arena, submitters[i].pair, uint16_t(i + 1), kDepthLog2, data,
                                    4096, nvme::kDirect, regions));
    pairs.back().heartbeat = address(&heartbeat);
  }
  fw::native::SoftwareController controller(
      std::make_shared<fw::native::MemoryStorage>(data, kBytes, true), pairs, regions,
      {.threads = threads, .spin_ns = 0, .long_idle_ns = 0, .yields = yields});
  controller.hear_launches(told != Told::kNothing);
  controller.start();

  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(budget_s);
  std::atomic<bool> over{false};
  std::vector<std::thread> running;
  for (uint32_t i = 0; i < count; ++i) {
    running.emplace_back([&, i] {
      std::mt19937_64 random(seed + i);
      Submitter& mine = submitters[i];
      while (std::chrono::steady_clock::now() < end) {
        pause(random);
        if (told == Told::kNothing) {
          mine.ring(address(targets) + i * 4096);
        } else if (random() % 8 == 0) {
          mine.ring(address(targets) + i * 4096);
          controller.wake();
        } else {
          controller.launch_begins();
          if (random() % 2 != 0) pause(random);
          mine.ring(address(targets) + i * 4096);
          // Threads that yield serve nothing before the end of the launch.
          if (!yields && random() % 2 != 0) {
            mine.wait();
            controller.launch_ends();
            continue;
          }
          controller.launch_ends();
        }
        mine.wait();
      }
    });
  }
  std::thread changing([&] {
    while (told == Told::kMost && !over.load()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      controller.hear_launches(false);
      controller.hear_launches(true);
    }
  });
  for (std::thread& thread : running) thread.join();
  over = true;
  changing.join();
  require(controller.counters().errors == 0, "no command failed");
  controller.stop();
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t seed = seed_of(count, arguments);
  for (uint32_t threads : {1, 2}) {
    for (bool yields : {false, true}) {
      for (Told told : {Told::kAll, Told::kMost, Told::kNothing}) {
        run(seed, threads, yields, told, seconds() / 12);
      }
    }
  }
  return EXIT_SUCCESS;
}
