// For the sanitizers: launches of the CPU device whose threads take items, or keep to their parts.
//
// A kernel adds to plain words, one of each item. After a launch each word has been added to once,
// by whichever thread took the item, and the launching thread sees it. Threads begin late or not at
// all. FLASHWARP_STRESS_SECONDS bounds the time.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/cpu_device.h"
#include "flashwarp/entry.cuh"
#include "turns.h"

using namespace fw;

namespace {

constexpr uint32_t kItemsMax = 3000;
constexpr uint32_t kLaunches = 200;  // in a turn

struct Work {
  uint32_t* words;
  uint32_t items;
  uint32_t step;
};

void add(const Work& work, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) work.words[i]++;
}

void taken_kernel(Work work) {
  warp::item_loop loop(work.items, work.step);
  uint64_t begin, end;
  while (loop.next(begin, end)) add(work, begin, end);
}

void parts_kernel(Work work) {
  const warp::share mine = warp::share_of(work.items, work.step);
  add(work, mine.begin, mine.end);
}

constexpr entry kTaken = make_entry<&taken_kernel>("taken");
constexpr entry kParts = make_entry<&parts_kernel>("parts");

void play(std::mt19937& random) {
  native::CpuPool pool(1 + random() % 5);
  std::vector<uint32_t> words(kItemsMax);
  for (uint32_t n = 0; n < kLaunches; ++n) {
    const Work work = {words.data(), uint32_t(random() % kItemsMax), uint32_t(1 + random() % 200)};
    const uint32_t threads = random() % 6;
    const void* arguments[] = {&work};
    std::fill(words.begin(), words.end(), 0);
    const bool launched = pool.launch(random() % 4 == 0 ? kParts : kTaken, arguments, threads, {});
    if (!launched) std::abort();
    for (uint32_t i = 0; i < kItemsMax; ++i) {
      if (words[i] == (i < work.items ? 1u : 0u)) continue;
      std::fprintf(stderr, "failed: item %u of %u was taken %u times\n", i, work.items, words[i]);
      std::abort();
    }
    // Threads that wait for the next launch go to sleep in the meantime, now and then.
    if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
}

}  // namespace

int main(int count, char** arguments) {
  return stress::take_turns(count, arguments, "pools",
                            [](uint32_t, std::mt19937& random) { play(random); });
}
