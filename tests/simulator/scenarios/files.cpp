// Files: parallel appends, each read back, made durable, and found where it was put; and records
// that whole warps write and read.
#include <algorithm>
#include <memory>
#include <vector>

#include "simulator/around.h"

using namespace fw::simulator;

namespace {

constexpr uint32_t kBytesMax = 90;  // of an append: up to three lines
constexpr uint32_t kEachMax = 3;

struct Appended {
  uint64_t at = 0;
  uint64_t nbytes = 0;
  int64_t got = 0;
  uint8_t value = 0;
};

class Files {
 public:
  Files(Machine& machine, uint64_t size)
      : machine_(machine),
        state_(machine.allocate<fw::file_state>(1, "file state", Sharing::kAtomic)),
        begin_(size) {
    state_->size = size;
    file_ = {machine.array<uint8_t>(), state_, fw::kFileRead | fw::kFileWrite, 0, 0};
    machine.at_rest([this] { check(); });
  }

  const fw::file& file() const { return file_; }

  // One thread appends bytes of its own, and reads them back.
  void append(Thread& t, uint32_t number) {
    uint8_t bytes[kBytesMax];
    Appended& mine = appended_[t.index * kEachMax + number];
    mine.nbytes = 1 + t.random.below(kBytesMax);
    mine.value = uint8_t(1 + (t.index * kEachMax + number) % 255);
    std::fill_n(bytes, mine.nbytes, mine.value);
    scheduler.current()->doing = "append";
    mine.got = fw::append(file_, bytes, mine.nbytes, &mine.at);
    accept(mine.got, mine.nbytes, fw::kFileNoSpace);
    if (mine.got <= 0) return;
    if (file_.size() < mine.at + mine.nbytes) scheduler.fail("the file ends before its last bytes");
    scheduler.current()->doing = "read back";
    std::fill_n(bytes, kBytesMax, uint8_t(0));
    const int64_t read = fw::read(file_, bytes, mine.at, mine.nbytes);
    accept(read, mine.nbytes, fw::kFileIo);
    if (read > 0 && !is(bytes, mine)) scheduler.fail("an append reads back as other bytes");
  }

  // All lanes of a warp. What they have appended is in the storage afterwards.
  void sync(Thread& t) {
    scheduler.current()->doing = "sync";
    const int64_t got = fw::warp::flush(file_, 0, file_.capacity());
    if (got < 0) return accept(got, 0, fw::kFileIo);
    for (uint32_t n = 0; n < kEachMax; ++n) {
      const Appended& mine = appended_[t.index * kEachMax + n];
      if (mine.got > 0 && !stored(mine)) scheduler.fail("a sync leaves bytes in the cache");
    }
  }

 private:
  // A call that may have failed.
  void accept(int64_t got, uint64_t nbytes, int64_t refusal) {
    const bool failed = got == fw::kFileIo || got == fw::kFileTimedOut;
    if (got == int64_t(nbytes) || got == refusal || (failed && machine_.faulty())) return;
    scheduler.fail("a call on a file returns " + std::to_string(got));
  }

  static bool is(const uint8_t* bytes, const Appended& a) {
    return std::all_of(bytes, bytes + a.nbytes, [&](uint8_t byte) { return byte == a.value; });
  }

  bool stored(const Appended& a) const {
    for (uint64_t k = 0; k < a.nbytes; ++k) {
      if (uint8_t(*machine_.stored(0, a.at + k)) != a.value) return false;
    }
    return true;
  }

  void check() {
    std::vector<Appended> all;
    for (const Appended& a : appended_) {
      if (a.nbytes != 0 && a.got != fw::kFileNoSpace) all.push_back(a);
    }
    std::sort(all.begin(), all.end(),
              [](const Appended& a, const Appended& b) { return a.at < b.at; });
    uint64_t end = begin_;
    for (const Appended& a : all) {
      if (a.at != end) throw Failure("appends overlap, or leave room between them\n");
      end = a.at + a.nbytes;
      if (a.got > 0 && !stored(a))
        throw Failure("the storage has other bytes than were appended\n");
    }
    if (state_->size != end) throw Failure("the file does not end behind its last append\n");
  }

  Machine& machine_;
  fw::file_state* state_;
  const uint64_t begin_;
  fw::file file_ = {};
  Appended appended_[32 * 8 * kEachMax];
};

// Records of all warps in turn, which warps write and read at their places.
class Records {
 public:
  static constexpr uint32_t kCount = 3;  // of each warp

  // `around`: of a hundred reads, or writes, how many go around the cache. `writes`: of a hundred
  // steps, how many write. `stride`: bytes from one record to the
  // next; then each is written first.
  Records(Machine& machine, uint64_t seed, uint32_t warps, uint32_t nbytes, uint32_t ahead,
          uint32_t around = 0, uint32_t writes = 40, uint32_t stride = 0)
      : machine_(machine),
        seed_(seed),
        state_(machine.allocate<fw::file_state>(1, "file state", Sharing::kAtomic)),
        nbytes_(nbytes),
        around_(around),
        writes_(writes),
        stride_(stride != 0 ? stride : nbytes),
        buffers_(warps, std::vector<uint8_t>(nbytes)),
        versions_(warps * kCount) {
    state_->size = 0;
    file_ = {machine.array<uint8_t>(), state_, fw::kFileRead | fw::kFileWrite, ahead, 0};
    machine.at_rest([this] { check(); });
  }

  // All lanes of a warp. Nobody else writes its records, so it reads what it has written last; it
  // reads others' records meanwhile, for their lines.
  void work(Thread& t, uint32_t steps) {
    // The lanes have to choose alike.
    Random random(seed_, 5000 + t.warp);
    std::vector<uint8_t>& buffer = buffers_[t.warp];
    for (uint32_t n = 0; n < steps; ++n) {
      const bool first = stride_ != nbytes_ && n < kCount;
      const uint32_t record = t.warp * kCount + (first ? n : random.below(kCount));
      const uint64_t at = uint64_t(record) * stride_;
      if (first || random.chance(writes_)) {
        // Tells the record, so that readers see bytes of another one.
        const uint32_t count = uint32_t(versions_.size());
        const uint8_t value = uint8_t(1 + record + count * random.below((255 - record) / count));
        if (t.lane == 0) std::fill(buffer.begin(), buffer.end(), value);
        fw::warp::sync(fw::warp::kFullMask);
        scheduler.current()->doing = "write";
        const int64_t got = write(random, buffer.data(), at);
        accept(got);
        if (t.lane == 0) versions_[record] = got == int64_t(nbytes_) ? value : 0;
        fw::warp::sync(fw::warp::kFullMask);
        if (got > 0 && file_.size() < at + nbytes_) scheduler.fail("the file ends in a record");
      } else if (random.chance(50) && versions_[record] != 0) {
        if (t.lane == 0) std::fill(buffer.begin(), buffer.end(), uint8_t(0));
        fw::warp::sync(fw::warp::kFullMask);
        scheduler.current()->doing = "read";
        const int64_t got = read(random, buffer.data(), at);
        accept(got);
        // Lanes that came apart read to one buffer, and one of them may have lost a race.
        fw::warp::sync(fw::warp::kFullMask);
        const bool right = std::all_of(buffer.begin(), buffer.end(),
                                       [&](uint8_t b) { return b == versions_[record]; });
        if (got > 0 && !right) scheduler.fail("a record reads back as other bytes");
        fw::warp::sync(fw::warp::kFullMask);
      } else {
        scheduler.current()->doing = "read another's";
        const uint32_t count = uint32_t(versions_.size());
        const uint32_t other = random.below(count);
        if (t.lane == 0) std::fill(buffer.begin(), buffer.end(), uint8_t(0));
        fw::warp::sync(fw::warp::kFullMask);
        const int64_t got = read(random, buffer.data(), uint64_t(other) * stride_);
        if (got < 0) accept(got);
        fw::warp::sync(fw::warp::kFullMask);
        // Its writer may be at it. A read that fails leaves anything, also of a part of the lanes.
        const bool right = std::all_of(buffer.begin(), buffer.end(), [&](uint8_t b) {
          return b == 0 || uint32_t(b - 1) % count == other;
        });
        if (!machine_.faulty() && !right)
          scheduler.fail("a record of another warp has bytes of a third one");
        fw::warp::sync(fw::warp::kFullMask);
      }
    }
  }

 private:
  int64_t read(Random& random, void* to, uint64_t at) {
    if (around_ != 0 && random.chance(around_)) {
      scheduler.current()->doing = "read around the cache";
      return fw::warp::read_around(file_, to, at, nbytes_);
    }
    return fw::warp::read(file_, to, at, nbytes_);
  }

  int64_t write(Random& random, const void* from, uint64_t at) {
    if (around_ != 0 && random.chance(around_)) {
      scheduler.current()->doing = "write around the cache";
      return fw::warp::write_around(file_, from, at, nbytes_);
    }
    return fw::warp::write(file_, from, at, nbytes_);
  }

  void accept(int64_t got) {
    const bool failed = got == fw::kFileIo || got == fw::kFileTimedOut;
    if (got == int64_t(nbytes_) || (failed && machine_.faulty())) return;
    scheduler.fail("a call on a file returns " + std::to_string(got));
  }

  void check() {
    for (uint32_t record = 0; record < versions_.size(); ++record) {
      if (versions_[record] == 0) continue;
      const uint64_t begin = uint64_t(record) * stride_;
      if (state_->size < begin + nbytes_) throw Failure("the file ends in a record\n");
      for (uint64_t k = 0; k < nbytes_; ++k) {
        if (uint8_t(*machine_.stored(0, begin + k)) != versions_[record])
          throw Failure("the storage has other bytes than were written\n");
      }
    }
  }

  Machine& machine_;
  const uint64_t seed_;
  fw::file_state* state_;
  const uint32_t nbytes_;
  const uint32_t around_;
  const uint32_t writes_;
  const uint32_t stride_;
  fw::file file_ = {};
  std::vector<std::vector<uint8_t>> buffers_;
  std::vector<uint8_t> versions_;  // what each record holds; 0: nobody knows
};

// Threads write lines of their own around the cache, which nobody else uses: they are in the
// storage when the write returns, and in no frame.
class Passed {
 public:
  static constexpr uint32_t kEach = 2;  // lines of each thread

  Passed(Machine& machine, uint32_t threads)
      : state_(machine.allocate<fw::file_state>(1, "file state", Sharing::kAtomic)),
        machine_(machine),
        threads_(threads) {
    state_->size = machine.array<uint8_t>().length;
    file_ = {machine.array<uint8_t>(), state_, fw::kFileRead | fw::kFileWrite, 0, 0};
  }

  // With `beside`, reads other lines as well.
  void work(Thread& t, uint32_t steps, bool beside) {
    const uint64_t own = uint64_t(t.index) * kEach * kLineBytes;
    uint8_t buffer[kEach * kLineBytes];
    for (uint32_t n = 0; n < steps; ++n) {
      // Whole lines and parts of them.
      const uint32_t skip = t.random.chance(50) ? 0 : t.random.below(kLineBytes);
      const uint32_t nbytes = kEach * kLineBytes - skip;
      const uint8_t value = uint8_t(1 + t.random.below(255));
      std::fill_n(buffer, nbytes, value);
      scheduler.current()->doing = "write around the cache";
      const int64_t got = fw::write_around(file_, buffer, own + skip, nbytes);
      if (got != int64_t(nbytes)) scheduler.fail("a call on a file returns " + std::to_string(got));
      look(own + skip, nbytes, value);
      if (!beside) continue;
      // Lines that take the frames of the set.
      scheduler.current()->doing = "read";
      uint8_t byte = 0;
      const uint32_t rest = uint32_t(file_.capacity() - others());
      if (fw::read(file_, &byte, others() + t.random.below(rest), 1) != 1) {
        scheduler.fail("a read fails without a fault");
      }
    }
  }

  // Reads all other lines, to fill the cache with them.
  void read_others() {
    uint8_t byte = 0;
    for (uint64_t at = others(); at < file_.capacity(); at += kLineBytes) {
      if (fw::read(file_, &byte, at, 1) != 1) scheduler.fail("a read fails without a fault");
    }
  }

  // How many of the other lines are in the cache.
  uint32_t resident() const {
    const fw::array<uint8_t>& bytes = file_.bytes;
    uint32_t count = 0;
    for (uint64_t at = others(); at < file_.capacity(); at += kLineBytes) {
      count += fw::cache::probe(bytes.geometry, bytes.line_begin + at / kLineBytes).found;
    }
    return count;
  }

 private:
  uint64_t others() const { return uint64_t(threads_) * kEach * kLineBytes; }

  void look(uint64_t begin, uint32_t nbytes, uint8_t value) {
    const fw::array<uint8_t>& bytes = file_.bytes;
    for (uint32_t k = 0; k < nbytes; ++k) {
      if (uint8_t(*machine_.stored(0, begin + k)) != value) {
        scheduler.fail("a write around the cache leaves bytes in it");
      }
    }
    for (uint64_t at = begin; at < begin + nbytes; at += kLineBytes) {
      if (fw::cache::probe(bytes.geometry, bytes.line_begin + at / kLineBytes).found) {
        scheduler.fail("a write around the cache leaves its line in a frame");
      }
    }
  }

  fw::file_state* state_;
  Machine& machine_;
  const uint32_t threads_;
  fw::file file_ = {};
};

}  // namespace

FW_SCENARIO(file_records, "warps write and read records of a file, whole warps together") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.lines = std::max(shape.lines, 12u);
  // Reads inside of one line have a way of their own: a line for each, and few frames, so that
  // they are evicted.
  const bool apart = run.random.chance(40);
  if (apart) {
    shape.sets = 1;
    shape.lines = std::max(shape.lines, shape.warps * Records::kCount + 1);
  }
  if (run.random.chance(30)) {
    draw_faults(run);
    if (kWidth == 32) run.faults.errors = std::min(run.faults.errors, 20u);
  }
  Machine machine(run, shape);
  const uint32_t room = uint32_t(machine.array<uint8_t>().length) / (shape.warps * Records::kCount);
  const uint32_t most = std::min(room, 480u);
  // Of many words each, or of any number of bytes.
  uint32_t nbytes = 1 + run.random.below(most);
  if (run.random.chance(50) && nbytes >= 16) nbytes = nbytes / 16 * 16;
  if (apart) nbytes = 32u << run.random.below(2);
  const uint32_t writes = apart ? 5 : 40;
  Records records(machine, run.seed, shape.warps, nbytes, run.random.below(4), 0, writes,
                  apart ? kLineBytes : 0);
  const uint32_t steps =
      (kWidth == 32 ? 3 : 2 + run.random.below(4)) + (apart ? 4 + Records::kCount : 0);
  machine.launch([&](Thread& t) { records.work(t, steps); });
  machine.settle();
}

FW_SCENARIO(files_around, "warps read records around the cache that others store and evict") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.sets = 1;
  shape.lines = std::max(shape.lines, 9u);
  shape.streamed = true;
  if (run.random.chance(20)) {
    draw_faults(run);
    if (kWidth == 32) run.faults.errors = std::min(run.faults.errors, 20u);
  }
  Machine machine(run, shape);
  const uint32_t room = uint32_t(machine.array<uint8_t>().length) / (shape.warps * Records::kCount);
  uint32_t nbytes = 1 + run.random.below(std::min(room, 300u));
  if (run.random.chance(50) && nbytes >= 16) nbytes = nbytes / 16 * 16;
  Records records(machine, run.seed, shape.warps, nbytes, 0, 70);
  const uint32_t steps = kWidth == 32 ? 3 : 3 + run.random.below(6);
  machine.launch([&](Thread& t) { records.work(t, steps); });
  machine.settle();
}

FW_SCENARIO(loads_around, "threads load around the cache what others store, load and evict") {
  Shape shape = Shape::draw(run.random);
  shape.streamed = true;
  if (run.random.chance(20)) draw_faults(run);
  Machine machine(run, shape);
  const auto volumes = elements_of(machine);
  const uint32_t operations = kWidth == 1 ? 3 + run.random.below(5) : 1 + run.random.below(4);
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t v = t.random.below(shape.volumes);
      Elements<>& data = *volumes[v];
      const uint32_t i = data.pick(t.random);
      const uint32_t dice = t.random.below(100);
      if (dice < 50) {
        load_around(machine, data, i, v);
      } else if (dice < 80) {
        data.store(i);
      } else {
        data.load(i);
      }
    }
  });
  for (auto& data : volumes) data->check();
  machine.settle();
}

FW_SCENARIO(stores_around, "threads store around the cache what others store, load and evict") {
  Shape shape = Shape::draw(run.random);
  shape.streamed = true;
  shape.tier_ways = run.random.chance(30) ? 1 + run.random.below(2) : 0;
  if (run.random.chance(20)) draw_faults(run);
  Machine machine(run, shape);
  const auto volumes = elements_of(machine);
  // The volume has its whole length, so that no write moves the end.
  auto* state = machine.allocate<fw::file_state>(1, "file state", Sharing::kAtomic);
  state->size = uint64_t(1) << 40;
  const uint32_t operations = kWidth == 1 ? 3 + run.random.below(5) : 1 + run.random.below(4);
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t v = t.random.below(shape.volumes);
      Elements<>& data = *volumes[v];
      const uint32_t i = data.pick(t.random);
      const uint32_t dice = t.random.below(100);
      if (dice < 45) {
        store_around(machine, data, i, *state, v);
      } else if (dice < 60) {
        data.store(i);
      } else if (dice < 80) {
        load_around(machine, data, i, v);
      } else {
        data.load(i);
      }
    }
  });
  for (auto& data : volumes) data->check();
  machine.settle();
}

FW_SCENARIO(files_passed, "threads write lines around the cache, beside loads of other lines") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  const uint32_t threads = shape.warps * kWidth;
  shape.lines = std::max(shape.lines, Passed::kEach * threads + 3);
  Machine machine(run, shape);
  Passed passed(machine, threads);
  const uint32_t steps = 2 + run.random.below(3);
  machine.launch([&](Thread& t) { passed.work(t, steps, true); });
  machine.settle();
}

FW_SCENARIO(passing_in_turns, "threads that write around a full cache take one frame of a set") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  const uint32_t threads = shape.warps * kWidth;
  shape.lines = Passed::kEach * threads + 2 * shape.sets * shape.ways;
  Machine machine(run, shape);
  Passed passed(machine, threads);
  uint32_t before = 0;
  const auto alone = [&](auto work) {
    machine.launch(
        [&](Thread& t) {
          if (t.index == 0) work();
        },
        1);
  };
  alone([&] {
    passed.read_others();
    before = passed.resident();
  });
  const uint32_t steps = 1 + run.random.below(3);
  machine.launch([&](Thread& t) { passed.work(t, steps, false); });
  alone([&] {
    if (passed.resident() + shape.sets < before) {
      scheduler.fail("writes around the cache take a second frame of a set");
    }
  });
  machine.settle();
}

FW_SCENARIO(files, "threads append to a file, read back what they appended, and sync") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.lines = std::max(shape.lines, 12u);
  if (run.random.chance(30)) {
    draw_faults(run);
    if (kWidth == 32) run.faults.errors = std::min(run.faults.errors, 20u);
  }
  Machine machine(run, shape);
  Files files(machine, run.random.below(200));
  const uint32_t each = 1 + run.random.below(kWidth == 32 ? 1 : kEachMax);
  const bool syncs = run.random.chance(50);
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < each; ++n) files.append(t, n);
    if (syncs) files.sync(t);
  });
  machine.settle();
}
