// Threads start more asynchronous requests than the rings have entries before any of them waits. If
// entries stayed with their issuer until it waits, the threads would block each other for ever.
#include "flashwarp/array.cuh"
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

using Words = Elements<uint64_t>;

constexpr uint32_t kLineWords = kLineBytes / sizeof(uint64_t);
constexpr uint32_t kRequestsMax = 6;

// One transfer that a thread has started, with the oracle's record of it.
class Request {
 public:
  // Starts anything, on any line.
  void start(Words& data, Random& random) {
    data_ = &data;
    element_ = data.pick(random);
    const uint32_t dice = random.below(100);
    if (dice < 50) {
      kind_ = Kind::kRead;
      note("start to read");
      token_ = data.array().read_async(element_, 1, &value_);
    } else if (dice < 65) {
      kind_ = Kind::kFetch;
      note("start to fetch");
      token_ = data.array().prefetch(element_, 1 + random.below(3 * kLineWords));
    } else if (dice < 85) {
      start_store();
    } else {
      kind_ = Kind::kWriteBack;
      note("start to write back");
      token_ = data.array().write_back(element_, 1);
    }
  }

  // Waits for it, after some looks.
  void finish(Random& random, bool may_fail) {
    if (kind_ == Kind::kRead) {
      data_->load_by(element_, "wait for a read", [&](uint32_t) { return read(random, may_fail); });
      return;
    }
    note("wait");
    const bool happened = wait(random, may_fail) == fw::nvme::kSuccess;
    if (kind_ == Kind::kStore) data_->end(operation_, element_, happened ? value_ : 0);
  }

 private:
  enum class Kind { kRead, kFetch, kStore, kWriteBack };

  // The store takes place at any time from here to the end of `finish`.
  void start_store() {
    kind_ = Kind::kStore;
    note("start to store");
    value_ = data_->next_value(element_);
    operation_ = data_->begin(element_, true, value_);
    token_ = data_->array().write_async(element_, 1, &value_);
  }

  uint64_t read(Random& random, bool may_fail) {
    return wait(random, may_fail) == fw::nvme::kSuccess ? value_ : 0;
  }

  uint32_t wait(Random& random, bool may_fail) {
    const uint32_t looks = random.below(4);
    for (uint32_t n = 0; n < looks && !token_.done(); ++n) fw::base::pause(0);
    const uint32_t status = token_.wait();
    if (status != fw::nvme::kSuccess && !may_fail) {
      scheduler.fail("a token failed without a fault");
    }
    if (token_.status() != status || !token_.done()) scheduler.fail("a token changes its mind");
    return status;
  }

  void note(const char* verb) {
    scheduler.current()->doing = std::string(verb) + " " + std::to_string(element_);
  }

  Words* data_ = nullptr;
  fw::token token_;
  Kind kind_ = Kind::kFetch;
  uint32_t element_ = 0;
  uint32_t operation_ = 0;
  uint64_t value_ = 0;
};

void start_more_than_fit(Run& run, const Shape& shape) {
  Machine machine(run, shape);
  Words data(machine, 0);
  const uint32_t requests = kWidth == 1 ? kRequestsMax : kWidth == 4 ? 3 : 2;
  machine.launch([&](Thread& t) {
    Request mine[kRequestsMax];
    for (uint32_t n = 0; n < requests; ++n) mine[n].start(data, t.random);
    // In any order, and without waiting for some of them.
    const uint32_t first = t.random.below(requests);
    const uint32_t waited = t.random.chance(80) ? requests : t.random.below(requests);
    for (uint32_t n = 0; n < waited; ++n) {
      mine[(first + n) % requests].finish(t.random, machine.faulty());
    }
  });
  data.check();
  machine.settle();
}

// One ring of two or four entries, and far more lines than frames.
Shape small_rings(Random& random) {
  Shape shape = Shape::draw(random);
  shape.volumes = 1;
  shape.queues = 1;
  shape.depth_log2 = 1 + random.below(2);
  shape.lines = 12;
  return shape;
}

}  // namespace

FW_SCENARIO(async, "each thread starts more transfers than the ring has entries, then waits") {
  start_more_than_fit(run, small_rings(run.random));
}

FW_SCENARIO(prefetch_lost, "threads prefetch and wait for nothing, and the controllers stop") {
  Shape shape = small_rings(run.random);
  shape.path = run.random.chance(50) ? fw::nvme::kInPlace : fw::nvme::kBounce;
  run.faults.stop_after = 1 + run.random.below(8);
  Machine machine(run, shape);
  Words data(machine, 0);
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < (kWidth == 1 ? 4 : 1); ++n) data.prefetch(data.pick(t.random));
  });
  machine.settle();
}

FW_SCENARIO(suspended, "the host's process is stopped for several time limits: no wait runs out") {
  const Shape shape = small_rings(run.random);
  if (!run.faults_given) {
    run.faults.suspend_after = 1 + run.random.below(30);
    run.faults.suspend_ns = uint32_t(Machine::kFairTimeoutNs * (2 + run.random.below(5)));
  }
  start_more_than_fit(run, shape);
}

FW_SCENARIO(host_lost, "the host's process is stopped for good: every wait ends all the same") {
  const Shape shape = small_rings(run.random);
  if (!run.faults_given) run.faults.suspend_after = 1 + run.random.below(30);
  start_more_than_fit(run, shape);
}

FW_SCENARIO(async_faults, "the same over disks that fail, wait, tear and stop") {
  const Shape shape = small_rings(run.random);
  draw_faults(run);
  // Where most transfers of 64 lanes fail, a launch takes millions of steps.
  if (kWidth == 32) run.faults.errors = std::min(run.faults.errors, 20u);
  start_more_than_fit(run, shape);
}
