// For the sanitizers: copies by threads in order, words between them, and pieces gathered by a
// pool.
//
// Callers queue copies on two copiers that wait for each other, while others gather and scatter; a
// copier is stopped in the middle now and then. What has arrived is compared with what was sent.
// FLASHWARP_STRESS_SECONDS bounds the time.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "transfer/gatherer.h"
#include "transfer/host_copier.h"
#include "turns.h"

using namespace fw;
using native::CopyPiece;
using native::Gatherer;
using native::HostCopier;
using stress::address;
using stress::require;

namespace {

// Words pass from one copier to the other and back, behind words that the host stores.
void relay(uint32_t seed) {
  std::mt19937 random(seed);
  HostCopier there, back;
  constexpr uint32_t kWords = 600;
  std::vector<uint64_t> source(kWords), middle(kWords), target(kWords);
  alignas(64) std::atomic<uint64_t> landed{0};
  const uint32_t rounds = 1 + random() % 8;
  for (uint32_t round = 1; round <= rounds; ++round) {
    const uint32_t cut = random() % kWords;
    there.wait_word(address(&landed), round);
    const uint64_t number = there.copy(
        {{address(middle.data()), address(source.data()), cut * 8},
         {address(middle.data() + cut), address(source.data() + cut), (kWords - cut) * 8}});
    back.wait_word(there.ended_address(), number);
    const uint64_t last = back.copy({{address(target.data()), address(middle.data()), kWords * 8}});
    for (uint64_t& each : source) each = random();
    landed.store(round, std::memory_order_release);
    require(back.wait(last, 30'000'000), "a copy ended");
    require(target == source, "the words arrived");
    for (const auto& each : back.results()) require(!each.withdrawn && each.failed < 0, "well");
    back.forget(last);
  }
}

// Jobs behind a word that nobody stores are withdrawn by a stop, and others do not wait for them.
void stop_in_the_middle(uint32_t seed) {
  std::mt19937 random(seed);
  HostCopier copier;
  uint64_t never = 0, a = 1, b = 0;
  const uint32_t before = random() % 3;
  for (uint32_t i = 0; i < before; ++i) copier.copy({{address(&b), address(&a), 8}});
  copier.wait_word(address(&never), 1);
  uint64_t last = 0;
  for (uint32_t i = 0; i < 3; ++i) last = copier.copy({{address(&b), address(&a), 8}});
  std::thread waiter([&] { require(copier.wait(last, 30'000'000), "the wait ends"); });
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  copier.stop();
  waiter.join();
  const auto results = copier.results();
  require(results.size() == before + 4, "each job has a result");
  require(results.back().withdrawn, "the last one was withdrawn");
}

void gather(Gatherer& gatherer, uint32_t seed) {
  std::mt19937 random(seed);
  const uint64_t piece = 8 * (1 + random() % 200);
  const uint64_t count = random() % 3000;
  std::vector<uint64_t> source(piece / 8 * std::max<uint64_t>(1, count));
  for (uint64_t& each : source) each = random();
  std::vector<int64_t> offsets(count);
  std::iota(offsets.begin(), offsets.end(), 0);
  std::shuffle(offsets.begin(), offsets.end(), random);
  for (int64_t& each : offsets) each *= int64_t(piece);
  std::vector<uint64_t> buffer(count * piece / 8 + 1);
  const Gatherer::Pieces pieces = {address(buffer.data()), offsets.data(), count, piece};
  require(gatherer.gather(address(source.data()), pieces).error == 0, "gathered");
  for (uint64_t i = 0; i < count; ++i) {
    require(buffer[i * piece / 8] == source[uint64_t(offsets[i]) / 8], "a piece is in its place");
  }
}

void play(std::mt19937& random) {
  Gatherer gatherer(1 + random() % 4);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 3; ++i) {
    threads.emplace_back([&gatherer, seed = uint32_t(random())] {
      for (uint32_t n = 0; n < 4; ++n) gather(gatherer, seed + n);
    });
  }
  threads.emplace_back([seed = uint32_t(random())] { relay(seed); });
  threads.emplace_back([seed = uint32_t(random())] { stop_in_the_middle(seed); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  return stress::take_turns(count, arguments, "turns of transfers",
                            [](uint32_t, std::mt19937& random) { play(random); });
}
