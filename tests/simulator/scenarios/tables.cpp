// Tables: warps update rows by gradients while others look rows up and evict their lines.
#include "flashwarp/kernels/table.cuh"
#include "flashwarp/kernels/table_ids.cuh"
#include "flashwarp/kernels/update.cuh"
#include "simulator/miss_list.h"

using namespace fw::simulator;
namespace kernels = fw::kernels;

namespace {

// What a step adds to a weight is a multiple of this, so that a value names its row and its column
// too. Floats have all of these numbers exactly.
constexpr uint32_t kStep = 4096;

uint32_t parts(uint32_t whole, uint32_t part) { return (whole + part - 1) / part; }

// A table of floats over a volume, and what its rows must have after each step.
class TableOfFloats {
 public:
  TableOfFloats(Machine& machine, uint32_t width, bool keeps_state)
      : machine_(machine),
        array_(machine.array<float>(0)),
        width_(width),
        row_floats_(keeps_state ? 2 * width : width),
        rows_(uint32_t(array_.length) / row_floats_),
        now_(size_t(rows_) * row_floats_, 0.0f) {
    for (uint32_t row = 0; row < rows_; ++row) {
      for (uint32_t i = 0; i < width; ++i) now_[row * row_floats_ + i] = float(row * width + i);
    }
    for (uint32_t k = 0; k < now_.size(); ++k) *stored(k) = now_[k];
    before_ = now_;
    // As frames: stores of half a word are told apart only where they may race.
    copies_ = machine.allocate<char>(uint64_t(machine.shape().warps) * row_bytes(), "copies",
                                     Sharing::kRacy);
    machine.at_rest([this] {
      for (uint32_t k = 0; k < now_.size(); ++k) {
        if (*stored(k) != now_[k]) {
          scheduler.fail("element " + std::to_string(k % row_floats_) + " of row " +
                         std::to_string(k / row_floats_) + " is " + std::to_string(*stored(k)) +
                         " in the storage, not " + std::to_string(now_[k]));
        }
      }
    });
  }
  TableOfFloats(const TableOfFloats&) = delete;

  uint32_t rows() const { return rows_; }

  // Draws the gradients of a step and adds them up by id. Nothing else runs.
  void begin_step(uint32_t count, Random& random) {
    before_ = now_;
    ids_.clear();
    // Few different ones, so that some fill several chunks.
    const uint32_t different = 1 + random.below(rows_);
    for (uint32_t k = 0; k < count; ++k) ids_.push_back(random.below(different));
    std::sort(ids_.begin(), ids_.end());
    order_.resize(count);
    for (uint32_t k = 0; k < count; ++k) order_[k] = (k + 1) % count;
    gradients_.assign(size_t(count) * width_, 0.0f);
    sums_.assign(gradients_.size(), 0.0f);
    std::vector<float> totals(now_.size(), 0.0f);
    for (uint32_t k = 0; k < count; ++k) {
      for (uint32_t i = 0; i < width_; ++i) {
        const float gradient = float(1 + (k + i) % 3);
        gradients_[order_[k] * width_ + i] = gradient;
        totals[ids_[k] * row_floats_ + i] += gradient;
      }
    }
    for (size_t k = 0; k < totals.size(); ++k) {
      if (keeps_state()) {
        // The weights stay, because the rate is zero.
        if (k % row_floats_ < width_) now_[k + width_] += totals[k] * totals[k];
      } else {
        now_[k] += kStep * totals[k];
      }
    }
    const kernels::sum_params p = {ids_.data(),  order_.data(), gradients_.data(),
                                   sums_.data(), count,         width_};
    const auto sum = [&](Thread& t) {
      become(t.lane, kWidth);
      fw_sum_gradients(p);
    };
    machine_.launch(sum, 1);
    bundle_ = 1 + random.below(kWidth);
  }

  // By every thread of the step, which are `count`.
  void update(uint32_t index, uint32_t count, const fw::cache::list_use& misses = {}) {
    become(index, count);
    kernels::update_params p = {};
    p.rows.geometry = array_.geometry;
    p.rows.cache = array_.cache;
    p.rows.volume = array_.volume;
    p.rows.indices = ids_.data();
    p.rows.index_count = ids_.size();
    p.rows.rows = copies_;
    p.rows.row_bytes = row_bytes();
    p.rows.row_count = rows_;
    p.rows.index_bytes = 8;
    p.rows.bundle = bundle_;
    p.rows.misses = misses;
    p.rows.segments = straddles() ? 2 : 1;
    p.sums = sums_.data();
    p.padding = ~uint64_t(0);
    p.rule = keeps_state() ? kernels::kAdagrad : kernels::kSgd;
    p.width = width_;
    p.rate = keeps_state() ? 0.0f : -float(kStep);
    p.epsilon = 1.0f;
    fw_update_rows(p);
  }

  // Looks rows up by one warp.
  void look_up(Thread& t, std::vector<int64_t>& ids, std::vector<float>& found) {
    if (t.lane == 0) draw(ids, found, 2 * kWidth, t.random);
    become(t.lane, kWidth);
    fw::warp::sync(fw::warp::kFullMask);
    fw_look_up_rows(lookup_of(ids, found));
    fw::warp::sync(fw::warp::kFullMask);
    if (t.lane == 0) check(ids, found);
  }

  // Draws ids of rows.
  void draw(std::vector<int64_t>& ids, std::vector<float>& found, size_t count, Random& random) {
    ids.resize(count);
    for (int64_t& id : ids) id = random.below(rows_);
    found.assign(ids.size() * width_, -1.0f);
  }

  // Each weight that a lookup has found is that before the step or behind it.
  void check(const std::vector<int64_t>& ids, const std::vector<float>& found) const {
    for (size_t k = 0; k < found.size(); ++k) {
      const size_t place = size_t(ids[k / width_]) * row_floats_ + k % width_;
      if (found[k] != before_[place] && found[k] != now_[place]) {
        scheduler.fail("a lookup of row " + std::to_string(ids[k / width_]) + " yields " +
                       std::to_string(found[k]) + " at " + std::to_string(k % width_) +
                       ", neither " + std::to_string(before_[place]) + " nor " +
                       std::to_string(now_[place]));
      }
    }
  }

  // Pools bags of `each` ids to their sums.
  kernels::lookup_params bags_of(std::vector<int64_t>& ids, uint32_t each,
                                 std::vector<float>& sums) const {
    kernels::lookup_params p = lookup_of(ids, sums);
    p.bags = ids.size() / each;
    p.bag_ids = each;
    p.pooling = kernels::pooling::kSum;
    const uint32_t tiles = parts(p.table.words, p.table.lanes * kernels::kLaneWords);
    p.warp_items = parts(uint32_t(p.bags) * tiles * p.table.lanes, kWidth);
    return p;
  }
  // Each sum is that of the rows of a bag, which no step changes meanwhile.
  void check_bags(const std::vector<int64_t>& ids, uint32_t each,
                  const std::vector<float>& sums) const {
    for (size_t k = 0; k < ids.size() / each * width_; ++k) {
      float expected = 0;
      for (size_t i = 0; i < each; ++i) {
        expected += now_[size_t(ids[k / width_ * each + i]) * row_floats_ + k % width_];
      }
      if (sums[k] != expected) {
        scheduler.fail("a bag yields " + std::to_string(sums[k]) + ", not " +
                       std::to_string(expected));
      }
    }
  }

  kernels::lookup_params lookup_of(std::vector<int64_t>& ids, std::vector<float>& found) const {
    kernels::lookup_params p = {};
    kernels::lookup_table& table = p.table;
    table.geometry = array_.geometry;
    table.cache = array_.cache;
    table.volume = array_.volume;
    table.row_bytes = row_bytes();
    table.row_count = table.padding = rows_;
    table.number = fw::base::number::kFloat32;
    table.dim = width_;
    table.word_bytes = row_bytes() % 16 == 0 ? 16 : row_bytes() % 8 == 0 ? 8 : 4;
    table.words = parts(width_ * 4, table.word_bytes);
    table.lanes = 1;
    while (table.lanes < kWidth && table.lanes * kernels::kLaneWords < table.words) {
      table.lanes *= 2;
    }
    table.straddles = straddles();
    p.ids = ids.data();
    p.out = reinterpret_cast<char*>(found.data());
    p.id_count = p.bags = ids.size();
    p.bag_ids = p.run = p.table_count = 1;
    p.out_stride = width_;
    const uint32_t tiles = parts(table.words, table.lanes * kernels::kLaneWords);
    p.warp_items = parts(uint32_t(ids.size()) * tiles * table.lanes, kWidth);
    p.index_bytes = 8;
    p.weight_number = p.out_number = fw::base::number::kFloat32;
    p.pooling = kernels::pooling::kNone;
    return p;
  }

 private:
  bool keeps_state() const { return row_floats_ != width_; }
  uint32_t row_bytes() const { return row_floats_ * 4; }
  bool straddles() const { return kLineBytes % row_bytes() != 0; }
  float* stored(uint32_t k) const { return reinterpret_cast<float*>(machine_.stored(0, k * 4)); }

  Machine& machine_;
  const fw::array<float> array_;
  const uint32_t width_;
  const uint32_t row_floats_;
  const uint32_t rows_;
  std::vector<float> now_;     // behind the step
  std::vector<float> before_;  // and before it
  std::vector<int64_t> ids_;
  std::vector<int64_t> order_;
  std::vector<float> gradients_;
  std::vector<float> sums_;
  char* copies_ = nullptr;
  uint32_t bundle_ = 1;
};

Shape shape_of_tables(Random& random) {
  Shape shape = Shape::draw(random);
  shape.volumes = 2;
  shape.sets = 1;
  shape.tier_ways = random.below(3);
  shape.warps = kWidth == 32 ? 2 : 3;
  return shape;
}

constexpr uint32_t kWidths[] = {2, 8, 15, 50};

}  // namespace

FW_SCENARIO(updates, "warps update rows of the same lines while these are evicted and written") {
  const Shape shape = shape_of_tables(run.random);
  Machine machine(run, shape);
  TableOfFloats table(machine, run.random.pick(kWidths), run.random.chance(50));
  Elements<> others(machine, 1);
  const uint32_t updating = 1 + run.random.below(shape.warps);
  for (uint32_t round = 0; round < 2; ++round) {
    table.begin_step(1 + run.random.below(40), run.random);
    machine.launch([&](Thread& t) {
      if (t.warp < updating) return table.update(t.index, updating * kWidth);
      for (uint32_t n = 0; n < 4; ++n) {
        others.use(t.random);
      }
    });
    others.check();
    machine.settle();
  }
}

FW_SCENARIO(lookups, "warps look rows up while these are updated, evicted and written") {
  const Shape shape = shape_of_tables(run.random);
  Machine machine(run, shape);
  TableOfFloats table(machine, run.random.pick(kWidths), run.random.chance(30));
  Elements<> others(machine, 1);
  std::vector<int64_t> ids;
  std::vector<float> found;
  for (uint32_t round = 0; round < 2; ++round) {
    table.begin_step(1 + run.random.below(8), run.random);
    machine.launch([&](Thread& t) {
      if (t.warp == 0) {
        table.look_up(t, ids, found);
      } else if (t.warp == 1) {
        table.update(t.lane, kWidth);
      } else {
        for (uint32_t n = 0; n < 6; ++n) others.load(others.pick(t.random));
      }
    });
    others.check();
    machine.settle();
  }
}

FW_SCENARIO(deferral_tables,
            "fetches of ids and updates leave rows that miss to some warps, by one list") {
  Shape shape = shape_of_tables(run.random);
  shape.plain = false;
  shape.warps = kWidth == 32 ? 4 : 5;
  Machine machine(run, shape);
  TableOfFloats table(machine, run.random.pick(kWidths), run.random.chance(50));
  Elements<> others(machine, 1);
  MissList misses(machine, (kWidth == 1 ? 3 : kWidth == 4 ? 5 : 8) + run.random.below(3));
  std::vector<int64_t> ids;
  std::vector<float> found;
  for (uint32_t round = 0; round < 2; ++round) {
    table.begin_step(1 + run.random.below(40), run.random);
    const uint32_t updating = 2 * kWidth;
    const auto step = misses.next_launch(1, 1 + run.random.below(kWidth));
    // Lookups see the step half done; bags are of rows that nobody changes.
    const bool pools = run.random.chance(50);
    const uint32_t each = 1 + run.random.below(5);
    const uint32_t looking = (shape.warps - 3) * kWidth + (pools ? updating : 0);
    table.draw(ids, found, pools ? each * (1 + run.random.below(12)) : 2 * kWidth, run.random);
    kernels::lookup_params p =
        pools ? table.bags_of(ids, each, found) : table.lookup_of(ids, found);
    const bool prefetches = run.random.chance(30);
    kernels::lookup_params ahead = p;
    ahead.misses = misses.next_launch(1, 1 + run.random.below(kWidth));
    ahead.run = 1 + run.random.below(kWidth);
    ahead.warp_items = parts(uint32_t(ids.size()), uint32_t(ahead.run));
    const auto look_up = [&](uint32_t index, uint32_t count) {
      become(index, count);
      prefetches ? fw_prefetch_ids(ahead) : fw_fetch_ids(ahead);
      pools ? fw_look_up_bags(p) : fw_look_up_rows(p);
    };
    if (pools) {
      machine.launch([&](Thread& t) {
        if (t.index < updating) table.update(t.index, updating, step);
      });
    }
    machine.launch([&](Thread& t) {
      if (!pools && t.index < updating) return table.update(t.index, updating, step);
      const uint32_t index = t.index - (pools ? 0 : updating);
      if (index < looking) return look_up(index, looking);
      for (uint32_t n = 0; n < 4; ++n) others.use(t.random);
    });
    pools ? table.check_bags(ids, each, found) : table.check(ids, found);
    others.check();
    machine.settle();
  }
}
