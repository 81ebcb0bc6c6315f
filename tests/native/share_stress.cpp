// For the sanitizers: threads keep lines in their own buffers. Owners, users, and readers and
// writers that hold no line, on a share table of a few entries over a cache of a few frames.
//
// Each element has one thread that stores to it, and its value names the element and a version. A
// reader checks that the value belongs to the element, is no older than the last store that had
// finished, and never goes backwards. Meanwhile, plain loads fill and evict the same lines. At the
// end the table is empty and the storage has every last value.
// FLASHWARP_STRESS_SECONDS is the budget (default 5).
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "device_threads.h"
#include "flashwarp/array/shared.cuh"

using namespace fw::stress;
namespace cache = fw::cache;
namespace nvme = fw::nvme;
using View = fw::shared<uint64_t, true>;

namespace {

constexpr uint32_t kLineBytes = 512;
constexpr uint32_t kLineWords = kLineBytes / 8;
constexpr uint32_t kDepthLog2 = 2;

[[noreturn]] void fail(const char* what, uint64_t element, uint64_t got, uint64_t expected) {
  std::fprintf(stderr, "failed: %s: element %llu holds %#llx, not %#llx\n", what,
               (unsigned long long)element, (unsigned long long)got, (unsigned long long)expected);
  std::abort();
}

uint64_t value_of(uint64_t element, uint32_t version) { return (element + 1) << 32 | version; }

class Rig {
 public:
  Rig(uint32_t lines, uint32_t bucket_bits, uint32_t path) : elements_(lines * kLineWords - 10) {
    cache_ = make_cache(arena_, 1, 4, kLineBytes);
    attach(path);
    const uint32_t entries = cache::kShareWays << bucket_bits;
    table_ = {arena_.allocate<uint64_t>(entries),
              arena_.allocate<cache::share_copy>(entries),
              arena_.allocate<uint32_t>(1u << bucket_bits),
              arena_.allocate<uint32_t>(1u << bucket_bits),
              bucket_bits,
              0};
    buffers_ = arena_.allocate<uint64_t>(kThreads * 2 * kLineWords);
  }
  Controllers& controllers() { return controllers_; }

  void use(uint32_t thread, uint32_t operations, uint32_t seed) {
    std::mt19937 random(seed * kThreads + thread);
    std::vector<uint32_t> seen(elements_, 0);
    View one(array_, table_);
    View two(array_, table_);
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t element = random() % elements_;
      const uint32_t dice = random() % 10;
      if (dice == 0) {
        // Past the table: may be old, and moves lines in and out of the cache.
        const uint64_t got = array_[element];
        if (got >> 32 != element + 1) fail("a plain load of another place", element, got, 0);
        continue;
      }
      const bool held = dice > 3 && acquire(one, element, buffer_of(thread, 0));
      const uint32_t other = random() % elements_;
      // Two lines at a time, in any order.
      const bool both = dice > 8 && held && other / kLineWords != element / kLineWords &&
                        acquire(two, other, buffer_of(thread, 1));
      for (uint32_t k = 0; k < 3; ++k) touch(one, element, thread, random, seen);
      if (both) touch(two, other, thread, random, seen);
      if (!one.owns_line()) release(one);
      if (both) release(two);
      release(one);
    }
  }

  void settle() {
    const uint32_t entries = cache::kShareWays << table_.bucket_bits;
    for (uint32_t e = 0; e < entries; ++e) {
      if (table_.words[e] != 0) fail("an entry at rest", e, table_.words[e], 0);
    }
    for (uint32_t b = 0; b < 1u << table_.bucket_bits; ++b) {
      if (table_.overflows[b] != 0) fail("an overflow at rest", b, table_.overflows[b], 0);
    }
    controllers_.flush(cache_, &cache_->volumes[0]);
    for (uint32_t i = 0; i < elements_; ++i) {
      const uint64_t expected = value_of(i, finished_[i]);
      if (data_[i] != expected) fail("storage after flush", i, data_[i], expected);
    }
  }

 private:
  uint64_t* buffer_of(uint32_t thread, uint32_t view) {
    return buffers_ + (thread * 2 + view) * kLineWords;
  }
  static bool acquire(View& view, uint32_t element, uint64_t* buffer) {
    const uint32_t status = view.acquire(element, buffer);
    if (status != nvme::kSuccess && status != fw::kShareFull) fail("acquire", element, status, 0);
    return status == nvme::kSuccess;
  }
  static void release(View& view) {
    const uint32_t status = view.release();
    if (status != nvme::kSuccess) fail("release", 0, status, 0);
  }

  // A load of the element, or a store to the one near it that is this thread's.
  void touch(View& view, uint32_t element, uint32_t thread, std::mt19937& random,
             std::vector<uint32_t>& seen) {
    const uint32_t mine = element - element % kThreads + thread;
    if (random() % 2 == 0 && mine < elements_ && mine / kLineWords == element / kLineWords) {
      const uint32_t version = finished_[mine].load(std::memory_order_relaxed) + 1;
      const uint32_t status = view.store(mine, value_of(mine, version));
      if (status != nvme::kSuccess) fail("store", mine, status, 0);
      finished_[mine].store(version, std::memory_order_release);
      return;
    }
    const uint32_t finished = finished_[element].load(std::memory_order_acquire);
    const uint64_t got = view[element];
    const uint64_t oldest = value_of(element, std::max(finished, seen[element]));
    if (got >> 32 != oldest >> 32) fail("a value of another place", element, got, oldest);
    if (got < oldest) fail("an old value", element, got, oldest);
    seen[element] = uint32_t(got);
  }

  void attach(uint32_t path) {
    data_ = arena_.allocate<uint64_t>(elements_);
    finished_ = std::make_unique<std::atomic<uint32_t>[]>(elements_);
    for (uint32_t i = 0; i < elements_; ++i) data_[i] = value_of(i, 0);
    const uint64_t bytes = uint64_t(elements_) * 8;
    cache::volume* v = attach_volume(arena_, cache_, bytes, 1, path);
    Regions regions;
    const auto pair =
        make_queue_pair(arena_, v->queues[0], 1, kDepthLog2, data_, kLineBytes, path, regions);
    controllers_.start(data_, bytes, {pair}, regions, {});
    array_ = {cache_->geometry, cache_, v, 0, elements_};
  }

  const uint32_t elements_;
  Arena arena_;
  cache::line_cache* cache_ = nullptr;
  uint64_t* data_ = nullptr;
  std::unique_ptr<std::atomic<uint32_t>[]> finished_;
  Controllers controllers_;
  fw::array<uint64_t> array_ = {};
  cache::share_table table_ = {};
  uint64_t* buffers_ = nullptr;
};

}  // namespace

int main(int count, char** arguments) {
  return take_turns(count, arguments, "tables", [](uint32_t turn, std::mt19937& random) {
    const uint32_t lines = turn % 3 == 0 ? 2 : 5 + random() % 8;
    Rig rig(lines, turn % 2, turn / 2 % 2 == 0 ? nvme::kInPlace : nvme::kBounce);
    for (uint32_t round = 0; round < 2; ++round) {
      const uint32_t round_seed = uint32_t(random());
      rig.controllers().launch(
          [&](uint32_t thread) { rig.use(thread, FW_TSAN ? 500 : 3000, round_seed); });
      rig.settle();
    }
  });
}
