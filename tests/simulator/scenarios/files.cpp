// Files: parallel appends, each read back, made durable, and found where it was put.
#include <algorithm>

#include "flashwarp/file.cuh"
#include "simulator/machine.h"

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
    const int64_t got = fw::warp::sync(file_, 0, file_.capacity());
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

}  // namespace

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
