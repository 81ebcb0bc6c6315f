// Threads that keep lines in buffers of their own, for the sanitizers: owners, users, and readers
// and writers who hold nothing, on a share table of a few entries over a cache of a few frames.
//
// Each element has one thread that stores to it, and its value names the element and a version: a
// reader checks that the value belongs there, is no older than what its writer had finished before,
// and never goes backwards. In between, plain loads of the same lines bring them into the cache and
// push them out. At the end the table is empty and the storage holds every last value.
// FLASHWARP_STRESS_SECONDS is the budget (default 5); the first argument replays a seed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "flashwarp/array/shared.cuh"
#include "flashwarp/kernels/maintenance.cuh"
#include "host_memory.h"
#include "software_controller.h"
#include "storage.h"

using namespace fw::native;
namespace cache = fw::cache;
namespace nvme = fw::nvme;
using View = fw::shared<uint64_t, true>;

namespace {

constexpr uint32_t kThreads = 4;
constexpr uint64_t kTimeoutNs = 60'000'000'000;
constexpr uint32_t kLineBytes = 512;
constexpr uint32_t kLineWords = kLineBytes / 8;
constexpr uint32_t kDepth = 4;

[[noreturn]] void fail(const char* what, uint64_t element, uint64_t got, uint64_t expected) {
  std::fprintf(stderr, "failed: %s: element %llu holds %#llx, not %#llx\n", what,
               (unsigned long long)element, (unsigned long long)got, (unsigned long long)expected);
  std::abort();
}

// Zero-filled memory that is freed at the end.
class Arena {
 public:
  ~Arena() {
    for (void* block : blocks_) free_aligned(block);
  }
  template <typename T>
  T* allocate(uint64_t count) {
    blocks_.push_back(allocate_aligned(std::max<uint64_t>(count * sizeof(T), 1), 4096));
    return static_cast<T*>(blocks_.back());
  }

 private:
  std::vector<void*> blocks_;
};

uint64_t value_of(uint64_t element, uint32_t version) { return (element + 1) << 32 | version; }

class Rig {
 public:
  Rig(uint32_t lines, uint32_t bucket_bits, uint32_t path) : elements_(lines * kLineWords - 10) {
    cache_ = arena_.allocate<cache::page_cache>(1);
    cache_->shape.tags = arena_.allocate<uint64_t>(4);
    cache_->shape.frames = arena_.allocate<char>(4 * kLineBytes);
    cache_->shape.set_count = 1;
    cache_->shape.ways = 4;
    cache_->shape.line_shift = uint32_t(__builtin_ctz(kLineBytes));
    cache_->set_control = arena_.allocate<uint32_t>(1);
    cache_->volumes = arena_.allocate<cache::volume>(cache::kVolumesMax);
    cache_->volume_end = 1;
    cache_->page_bytes = 2 << 20;
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
  ~Rig() { controller_->stop(); }

  void launch(const std::function<void(uint32_t)>& work) {
    std::vector<std::thread> threads;
    fw_visitor_comes(controller_.get());
    for (uint32_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        fw::base::this_thread = {i, kThreads, &serve, this};
        work(i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    fw_visitor_leaves(controller_.get());
  }

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
    fw::kernels::maintenance_params p = {};
    p.cache = cache_;
    p.volume = &cache_->volumes[0];
    p.line_end = p.volume->line_count;
    p.opcode = nvme::kFlush;
    launch([&](uint32_t) { fw_flush_lines(p); });
    launch([&](uint32_t) { fw_quiesce(p); });
    if (p.volume->errors->count != 0) fail("a command", 0, p.volume->errors->status, 0);
    for (uint32_t i = 0; i < elements_; ++i) {
      const uint64_t expected = value_of(i, finished_[i]);
      if (data_[i] != expected) fail("storage after flush", i, data_[i], expected);
    }
  }

 private:
  static int serve(void* self) { return fw_serve(static_cast<Rig*>(self)->controller_.get(), 0); }

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
    auto* q = arena_.allocate<nvme::queue_pair>(1);
    auto* bells = arena_.allocate<uint32_t>(32);
    q->sq = arena_.allocate<nvme::command>(kDepth);
    q->cq = arena_.allocate<nvme::completion>(kDepth);
    q->sq_doorbell = bells;
    q->cq_doorbell = bells + 16;
    q->slots = arena_.allocate<uint64_t>(kDepth);
    q->detached = arena_.allocate<nvme::detached_command>(kDepth);
    q->data = {reinterpret_cast<uint64_t>(data_), 0, kLineBytes, kTimeoutNs, path, 0};
    std::vector<std::pair<uint64_t, uint64_t>> regions;
    if (path == nvme::kBounce) {
      q->data.buffers = reinterpret_cast<uint64_t>(arena_.allocate<char>(kDepth * kLineBytes));
      regions.emplace_back(q->data.buffers, kDepth * kLineBytes);
    }
    q->depth_log2 = uint32_t(__builtin_ctz(kDepth));
    q->id = 1;
    const auto at = [](const auto* p) { return reinterpret_cast<uint64_t>(p); };
    controller_ = std::make_unique<SoftwareController>(
        std::make_shared<MemoryStorage>(data_, uint64_t(elements_) * 8, true),
        std::vector<QueuePairAddresses>{
            {at(q->sq), at(q->cq), at(q->sq_doorbell), at(q->cq_doorbell), kDepth, 1}},
        regions, ControllerOptions{});
    controller_->start();
    cache::volume& v = cache_->volumes[0];
    v.line_count = (elements_ + kLineWords - 1) / kLineWords;
    v.bytes = uint64_t(elements_) * 8;
    v.queues = q;
    v.events = arena_.allocate<cache::counters>(cache::kCounterShards);
    v.errors = arena_.allocate<cache::error_record>(1);
    v.queue_count = 1;
    v.path = path;
    array_ = {cache_->shape, cache_, &v, 0, elements_};
  }

  const uint32_t elements_;
  Arena arena_;
  cache::page_cache* cache_ = nullptr;
  uint64_t* data_ = nullptr;
  std::unique_ptr<std::atomic<uint32_t>[]> finished_;
  std::unique_ptr<SoftwareController> controller_;
  fw::array<uint64_t> array_ = {};
  cache::share_table table_ = {};
  uint64_t* buffers_ = nullptr;
};

}  // namespace

int main(int count, char** arguments) {
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
  for (; turn == 0 || spent() < budget; ++turn) {
    const uint32_t lines = turn % 3 == 0 ? 2 : 5 + random() % 8;
    Rig rig(lines, turn % 2, turn / 2 % 2 == 0 ? nvme::kMapped : nvme::kBounce);
    for (uint32_t round = 0; round < 2; ++round) {
      const uint32_t round_seed = uint32_t(random());
      rig.launch([&](uint32_t thread) { rig.use(thread, FW_TSAN ? 500 : 3000, round_seed); });
      rig.settle();
    }
  }
  std::printf("%u tables in %.1f s\n", turn, spent());
  return EXIT_SUCCESS;
}
