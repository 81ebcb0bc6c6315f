// The share table: lines in threads' buffers, which all threads find before the cache.
#include "flashwarp/array/shared.cuh"
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

namespace cache = fw::cache;
namespace nvme = fw::nvme;
using Words = Elements<uint64_t>;
using View = fw::shared<uint64_t, true>;

// A table, and lines of buffer for each thread, some of them in its block's memory.
class Table {
 public:
  Table(Machine& machine, uint32_t bucket_bits, uint32_t threads, bool of_block)
      : of_block_(of_block) {
    const uint32_t entries = cache::kShareWays << bucket_bits;
    Region words = {"share words", nullptr, entries * 8};
    words.describe = &describe_word;
    words.check = &check_word;
    words.owner = this;
    table_.words = reinterpret_cast<uint64_t*>(memory.allocate(words));
    table_.copies = machine.allocate<cache::share_copy>(entries, "share copies");
    table_.locks = machine.allocate<uint32_t>(1u << bucket_bits, "share locks", Sharing::kAtomic);
    table_.overflows =
        machine.allocate<uint32_t>(1u << bucket_bits, "share overflows", Sharing::kAtomic);
    table_.bucket_bits = bucket_bits;
    buffers_ = machine.allocate<uint64_t>(uint64_t(threads) * kViews * kLineWords, "own buffers");
    if (of_block) {
      Region region = {"block buffers", nullptr, uint64_t(threads) * kViews * kLineBytes};
      region.sharing = Sharing::kChecked;
      region.of_block = true;
      block_buffers_ = reinterpret_cast<uint64_t*>(memory.allocate(region));
    }
    machine.at_rest([this] { check_rest(); });
  }

  static constexpr uint32_t kLineWords = kLineBytes / 8;
  // Of a thread, at most.
  static constexpr uint32_t kViews = 2;

  const cache::share_table& table() const { return table_; }
  uint64_t* buffer_of(Thread& t, uint32_t view) {
    uint64_t* buffers = of_block_ && t.random.chance(40) ? block_buffers_ : buffers_;
    return buffers + (t.index * kViews + view) * kLineWords;
  }

  // A copy in a block's memory is that block's alone.
  void check_reach(const Thread& t, const View& view) const {
    const uint64_t* at = view.buffer();
    if (!memory.of_block(at)) return;
    if (uint64_t(at - block_buffers_) / kLineWords / kViews / kWidth != t.warp) {
      scheduler.fail("a copy in another block's memory is used");
    }
  }

  bool of_block() const { return of_block_; }
  bool is_empty() const {
    for (uint32_t e = 0; e < cache::kShareWays << table_.bucket_bits; ++e) {
      if (table_.words[e] != 0) return false;
    }
    return true;
  }

 private:
  void check_rest() {
    if (!is_empty()) throw Failure("at rest: an entry is left in the share table\n");
    for (uint32_t b = 0; b < 1u << table_.bucket_bits; ++b) {
      if (table_.locks[b] != 0) throw Failure("at rest: a lock of the share table is held\n");
      if (table_.overflows[b] != 0) {
        throw Failure("at rest: a bucket counts entries behind it\n");
      }
    }
  }

  static std::string describe_word(uint64_t word) {
    constexpr const char* kStates[] = {"FREE", "FILLING", "SHARED", "CLOSING"};
    std::string text = kStates[word >> 62];
    if (cache::share::state_of(word) == cache::share::kFree) return text;
    text += " line " + std::to_string(cache::share::line_of(word)) + " references " +
            std::to_string(cache::share::references(word));
    if ((word & cache::share::kModified) != 0) text += " modified";
    return text;
  }

  static void check_word(void* owner, uint64_t entry, uint64_t before, uint64_t after) {
    namespace share = cache::share;
    const cache::share_table& table = static_cast<Table*>(owner)->table_;
    const auto wrong = [&](const char* what) {
      scheduler.fail(std::string(what) + ": share words[" + std::to_string(entry) + "] from " +
                     describe_word(before) + " to " + describe_word(after));
    };
    const uint64_t from = share::state_of(before);
    const uint64_t to = share::state_of(after);
    const bool goes_on =
        (from == share::kFree && to == share::kFilling) ||
        (from == share::kFilling && (to == share::kShared || to == share::kFree)) ||
        (from == share::kShared && (to == share::kShared || to == share::kClosing)) ||
        (from == share::kClosing &&
         (to == share::kClosing || to == share::kFree || to == share::kShared));
    if (!goes_on) wrong("no way for a copy to go");
    if (from == share::kClosing && share::references(before) == 0 &&
        share::references(after) != 0) {
      wrong("a copy that is its owner's again is joined");
    }
    if (to == share::kFree && share::references(before) != 0) wrong("a copy ends under its users");
    if (from != share::kFree) return;
    for (uint32_t e = 0; e < cache::kShareWays << table.bucket_bits; ++e) {
      if (e != entry && share::is_of(table.words[e], share::line_of(after))) {
        wrong("two entries of one line");
      }
    }
  }

  const bool of_block_;
  cache::share_table table_ = {};
  uint64_t* buffers_ = nullptr;
  uint64_t* block_buffers_ = nullptr;
};

// A view of one array, as one thread uses it.
class Session {
 public:
  Session(Machine& machine, Words& data, Table& table, Thread& t, uint32_t number)
      : machine_(machine),
        data_(data),
        table_(table),
        thread_(t),
        number_(number),
        view_(data.array(), table.table()) {}

  // Whether the thread holds the line of element `i` now.
  bool acquire(uint32_t i, bool waits = true) {
    uint64_t* own = table_.buffer_of(thread_, number_);
    note(waits ? "acquire" : "try to acquire", i);
    const uint32_t status = waits ? view_.acquire(i, own) : view_.try_acquire(i, own);
    if (status == nvme::kSuccess) {
      table_.check_reach(thread_, view_);
      return true;
    }
    const bool expected = status == fw::kShareFull || (!waits && status == fw::kShareLater);
    if (!expected && !machine_.faulty()) scheduler.fail("an acquire failed without a fault");
    // But for one of before that could not be released.
    if (view_.holds_line() && !machine_.timed_out()) {
      scheduler.fail("a failed acquire holds a line");
    }
    return false;
  }
  // Releases, however often it has to try: stores to a copy are lost if its owner goes away.
  // Returns false after the time limit; the line is then still held, and its buffer still the
  // table's.
  bool release(bool polls = false) {
    note("release", 0);
    while (true) {
      const uint32_t status = polls ? view_.try_release() : view_.release();
      if (status == nvme::kSuccess) return true;
      if (machine_.timed_out()) return false;
      if (status == fw::kShareLater && polls) {
        fw::base::pause(0);
      } else if (!machine_.faulty()) {
        scheduler.fail("a release failed without a fault");
      }
    }
  }
  void load(uint32_t i) {
    data_.load_by(i, "load through a view", [&](uint32_t j) { return view_[j]; });
  }
  void store(uint32_t i) {
    data_.store_by(i, "store through a view",
                   [&](uint32_t j, uint64_t value) { return view_.store(j, value); });
  }
  // Some loads and stores of elements of the line of `i`.
  void use(uint32_t i, uint32_t count, uint32_t stores) {
    const uint32_t first = i - i % Table::kLineWords;
    const uint32_t last = std::min(first + Table::kLineWords, data_.length()) - 1;
    const uint32_t places[] = {first, first + 1, last};
    for (uint32_t n = 0; n < count; ++n) {
      const uint32_t at = thread_.random.pick(places);
      if (thread_.random.chance(stores)) {
        store(at);
      } else {
        load(at);
      }
    }
  }
  View& view() { return view_; }

 private:
  void note(const char* verb, uint32_t i) {
    scheduler.current()->doing = std::string(verb) + " " + std::to_string(i);
  }

  Machine& machine_;
  Words& data_;
  Table& table_;
  Thread& thread_;
  const uint32_t number_;
  View view_;
};

// Two lines at a time, in any order; a copy of another owner is released first. A copy in another
// block's memory cannot be joined, so threads that may wait for one take lines in ascending order.
// Returns false if a line is still held.
bool use_two_lines(Machine& machine, Words& data, Table& table, Thread& t, uint32_t stores) {
  const uint32_t a = data.pick(t.random);
  const uint32_t b = data.pick(t.random);
  if (a / Table::kLineWords == b / Table::kLineWords) return true;
  const bool swaps = !table.of_block() && t.random.chance(50);
  Session one(machine, data, table, t, 0);
  Session two(machine, data, table, t, 1);
  const uint32_t first = swaps ? std::max(a, b) : std::min(a, b);
  const uint32_t second = a + b - first;
  const bool has_first = one.acquire(first);
  const bool has_second = two.acquire(second);
  if (has_first) one.use(first, 1, stores);
  if (has_second) two.use(second, 1, stores);
  if (has_first && !one.view().owns_line()) one.release();
  if (has_second) two.release();
  if (has_first) one.release();
  return !one.view().holds_line() && !two.view().holds_line();
}

void use_views(Run& run, const Shape& shape, uint32_t operations) {
  Machine machine(run, shape);
  Words data(machine, 0);
  Table table(machine, run.random.below(3), shape.warps * kWidth, run.random.chance(30));
  std::unique_ptr<Words> others;
  if (shape.volumes > 1) others = std::make_unique<Words>(machine, 1);
  auto* flag = machine.allocate<uint32_t>(1, "flag", Sharing::kAtomic);
  const uint32_t stores = 20 + run.random.below(70);
  machine.launch([&](Thread& t) {
    Session one(machine, data, table, t, 0);
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t i = data.pick(t.random);
      const uint32_t dice = t.random.below(100);
      if (dice % 3 == 0) fw::atomic::load_acquire(flag);
      if (dice < 45) {
        const bool held = one.acquire(i, dice >= 10);
        one.use(i, 1 + t.random.below(3), stores);
        if (held && !one.release(dice % 2 == 0)) return;
      } else if (dice < 55) {
        if (!use_two_lines(machine, data, table, t, stores)) return;
      } else if (dice < 80) {
        one.use(i, 1, stores);
      } else if (dice < 90 || others == nullptr) {
        // Its line may leave the cache while it has a copy, and come back.
        data.prefetch(i);
      } else if (t.random.chance(50)) {
        others->store(others->pick(t.random));
      } else {
        others->load(others->pick(t.random));
      }
      if (dice % 3 == 1) fw::atomic::store_release(flag, t.index);
    }
  });
  data.check();
  if (others != nullptr) others->check();
  machine.settle();
}

}  // namespace

FW_SCENARIO(share, "lines in threads' buffers, handed from owner to owner over a small cache") {
  Shape shape = Shape::draw(run.random);
  shape.lines = run.random.chance(50) ? 2 : shape.lines;
  use_views(run, shape, kWidth == 1 ? 1 + run.random.below(5) : 1 + run.random.below(2));
}

FW_SCENARIO(share_faults, "the same over disks that fail, wait, tear and stop") {
  Shape shape = Shape::draw(run.random);
  draw_faults(run);
  use_views(run, shape, kWidth == 1 ? 1 + run.random.below(4) : 1);
}

FW_SCENARIO(share_full, "more lines than the table has entries, each in a buffer of its own") {
  Shape shape;
  shape.lines = 12;
  shape.sets = 2;
  shape.depth_log2 = 2;
  shape.warps = kWidth == 32 ? 1 : kWidth == 4 ? 2 : 8;
  Machine machine(run, shape);
  Words data(machine, 0);
  Table table(machine, run.random.below(2), shape.warps * kWidth, false);
  machine.launch([&](Thread& t) {
    Session one(machine, data, table, t, 0);
    for (uint32_t n = 0; n < 2; ++n) {
      const uint32_t i = (t.index + n) % shape.lines * Table::kLineWords;
      const bool held = one.acquire(i);
      one.use(i, 2, 50);
      if (held) one.release();
    }
  });
  data.check();
  machine.settle();
}

FW_SCENARIO(share_pair, "two threads hand one line over: small enough for every schedule") {
  Shape shape;
  shape.lines = 2;
  Machine machine(run, shape);
  Words data(machine, 0);
  Table table(machine, 0, shape.warps * kWidth, false);
  machine.launch([&](Thread& t) {
    Session one(machine, data, table, t, 0);
    one.acquire(0);
    one.load(0);
    one.store(t.warp);
    one.release();
  });
  data.check();
  machine.settle();
}
