// For the sanitizers: device threads update rows of a table, and look at rows beside that.
//
// The cache has a few frames, and rings have a few entries, so nearly every row is read again,
// and lines are written back while other rows of theirs change. Each step adds integers to the
// weights of rows, often of the same row, so the result is exact in any order. A thread that looks
// at an element beside the step sees its value before or after. After each step the storage must
// have every row. FLASHWARP_STRESS_SECONDS is the budget (default 5).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

// Before array.cuh, which it prepares for kernels that whole warps run.
#include "flashwarp/kernels/update.cuh"

#include "device_threads.h"

using namespace fw::stress;
namespace cache = fw::cache;
namespace kernels = fw::kernels;
namespace nvme = fw::nvme;

namespace {

struct Geometry {
  uint32_t sets;
  uint32_t queues;
  uint32_t depth_log2;
  uint32_t path;
  uint32_t controller_threads;
  uint32_t rows;
  uint32_t width;  // weights of a row
  uint32_t ids;    // of a step
};

constexpr uint32_t kLineBytes = 512;
constexpr uint32_t kWays = 4;

const Geometry* running = nullptr;

[[noreturn]] void fail(const char* what, uint64_t where, float got, float expected) {
  std::fprintf(stderr, "failed: %s: element %llu holds %g, not %g\n", what,
               (unsigned long long)where, double(got), double(expected));
  if (running != nullptr) {
    const Geometry& g = *running;
    std::fprintf(stderr, "%u sets, %u queues of %u, path %u, %u threads, %u rows of %u, %u ids\n",
                 g.sets, g.queues, 1u << g.depth_log2, g.path, g.controller_threads, g.rows,
                 g.width, g.ids);
  }
  std::abort();
}

class Rig {
 public:
  explicit Rig(const Geometry& g) : g_(g), count_(uint64_t(g.rows) * g.width) {
    cache_ = make_cache(arena_, g.sets, kWays, kLineBytes);
    attach();
    model_.assign(count_, 0);
    copies_.resize(uint64_t(kThreads) * g_.width);
  }

  // Adds small integers to the weights of random rows, some of them many times.
  void step(std::mt19937& random) {
    ids_.resize(g_.ids);
    for (int64_t& id : ids_) {
      id = int64_t(random() % 3 == 0 ? random() % 2 : random() % g_.rows);
    }
    std::sort(ids_.begin(), ids_.end());
    order_.resize(g_.ids);
    for (uint32_t k = 0; k < g_.ids; ++k) order_[k] = k;
    std::shuffle(order_.begin(), order_.end(), random);
    gradients_.resize(uint64_t(g_.ids) * g_.width);
    for (float& each : gradients_) each = -float(random() % 4);
    sums_.assign(gradients_.size(), 0);
    before_ = model_;
    for (uint32_t k = 0; k < g_.ids; ++k) {
      for (uint32_t i = 0; i < g_.width; ++i) {
        model_[uint64_t(ids_[k]) * g_.width + i] -= gradients_[uint64_t(order_[k]) * g_.width + i];
      }
    }
    const uint32_t seed = uint32_t(random());
    controllers_.launch([&](uint32_t) { fw_sum_gradients(sum_params()); });
    controllers_.launch([&](uint32_t thread) {
      std::mt19937 own(seed * kThreads + thread);
      look(own);
      fw_update_rows(update_params());
      look(own);
    });
  }

  // Flush, then the storage holds every row.
  void settle() {
    controllers_.flush(cache_, volume_);
    for (uint64_t i = 0; i < count_; ++i) {
      if (data_[i] != model_[i]) fail("storage after flush", i, data_[i], model_[i]);
    }
  }

 private:
  void look(std::mt19937& random) {
    for (uint32_t n = 0; n < 200; ++n) {
      const uint64_t i = random() % count_;
      const float got = array_[i];
      if (got != before_[i] && got != model_[i]) fail("a value of no step", i, got, model_[i]);
    }
  }

  kernels::sum_params sum_params() {
    return {ids_.data(), order_.data(), gradients_.data(), sums_.data(), g_.ids, g_.width};
  }

  kernels::update_params update_params() {
    kernels::update_params p = {};
    kernels::row_params& r = p.rows;
    r.geometry = cache_->geometry;
    r.cache = cache_;
    r.volume = volume_;
    r.indices = ids_.data();
    r.index_count = g_.ids;
    r.row_bytes = g_.width * sizeof(float);
    r.row_count = g_.rows;
    r.index_bytes = 8;
    r.bundle = 1;
    // Rows begin anywhere.
    r.segments = (r.row_bytes + kLineBytes - 2) / kLineBytes + 1;
    r.rows = reinterpret_cast<char*>(copies_.data());
    p.sums = sums_.data();
    p.padding = ~uint64_t(0);
    p.rule = kernels::kSgd;
    p.width = g_.width;
    p.rate = 1;
    return p;
  }

  void attach() {
    const uint64_t bytes = count_ * sizeof(float);
    volume_ = attach_volume(arena_, cache_, bytes, g_.queues, g_.path);
    data_ = arena_.allocate<float>(count_ + 1);
    std::vector<fw::native::QueuePairAddresses> pairs;
    Regions regions;
    for (uint32_t i = 0; i < g_.queues; ++i) {
      pairs.push_back(make_queue_pair(arena_, volume_->queues[i], uint16_t(i + 1), g_.depth_log2,
                                      data_, kLineBytes, g_.path, regions));
    }
    fw::native::ControllerOptions options;
    options.threads = g_.controller_threads;
    controllers_.start(data_, bytes, pairs, regions, options);
    array_ = {cache_->geometry, cache_, volume_, 0, count_};
  }

  const Geometry g_;
  const uint64_t count_;
  Arena arena_;
  cache::line_cache* cache_ = nullptr;
  cache::volume* volume_ = nullptr;
  float* data_ = nullptr;
  fw::array<float> array_ = {};
  std::vector<float> model_, before_, gradients_, sums_, copies_;
  std::vector<int64_t> ids_, order_;
  Controllers controllers_;
};

// The hardest first: one set, rings of two entries; rows in one line, then in several.
Geometry choose(uint32_t turn, std::mt19937& random) {
  constexpr uint32_t kWidths[] = {16, 24, 100, 300};
  Geometry g = {1, 1, 1, turn % 2, turn / 2 % 3, 60, kWidths[turn % 4], 100};
  if (turn < 12) return g;
  g.sets = 1 + random() % 5;
  g.queues = 1 + random() % 3;
  g.depth_log2 = 1 + random() % 3;
  g.rows = 3 + random() % 300;
  g.width = 2 * (1 + random() % 150);
  g.ids = 1 + random() % 300;
  return g;
}

}  // namespace

int main(int count, char** arguments) {
  return take_turns(count, arguments, "geometries", [](uint32_t turn, std::mt19937& random) {
    const Geometry g = choose(turn, random);
    running = &g;
    Rig rig(g);
    for (uint32_t round = 0; round < 4; ++round) {
      rig.step(random);
      rig.settle();
    }
    running = nullptr;
  });
}
