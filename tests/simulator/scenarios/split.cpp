// Launches whose misses a stream waits for: submitted by one kernel, landed and served by later
// ones. Nothing of the device runs in between, so nothing there can drain.
#include "simulator/row_job.h"

using namespace fw::simulator;

namespace {

// Lanes that come and go together, as the kernels of one stream begin and end.
class Stream {
 public:
  Stream(Machine& machine, uint32_t threads)
      : threads_(threads), ended_(machine.allocate<uint32_t>(1, "stream", Sharing::kAtomic)) {}

  // The end of a kernel: what its threads have done comes before the next one.
  void end_kernel() {
    fw::atomic::fence_system();
    const uint32_t turn = fw::atomic::add_release(ended_, 1u) / threads_ + 1;
    while (fw::atomic::load_acquire(ended_) < turn * threads_) fw::base::pause(200);
    fw::atomic::fence_system();
  }

 private:
  const uint32_t threads_;
  uint32_t* ended_;
};

// What a stream does in cuStreamWaitValue32.
void wait_for(const Machine& machine, const fw::nvme::batch& b) {
  while (fw::atomic::load_relaxed_system(&b.record->done) == 0) {
    if (machine.may_time_out()) scheduler.dawdle();
    fw::base::pause(200);
  }
}

// The word means what it says, unless the host has given up.
void check_ended(const Machine& machine, const fw::nvme::batch& b) {
  if (b.ended != 0) scheduler.fail("a launch has left its batch in the middle");
  if (machine.may_time_out()) return;
  if (b.record->submitted != b.submitted) scheduler.fail("a batch was not published");
  if (b.record->completed != b.submitted) scheduler.fail("the word came early");
}

void use_otherwise(Elements<>& data, Random& random, bool may_fail) {
  for (uint32_t n = 0; n < 3; ++n) {
    const uint32_t i = data.pick(random);
    const uint32_t dice = random.below(100);
    if (dice < 40) {
      data.prefetch(i);
    } else if (dice < 70 && !may_fail) {
      data.store(i);
    } else {
      data.load(i);
    }
  }
}

Shape split_shape(Random& random) {
  Shape shape = Shape::draw(random);
  shape.volumes = 1;
  shape.plain = shape.plain && random.chance(20);
  shape.tier_ways = random.chance(40) ? 1 : 0;
  shape.batches = 2;
  return shape;
}

// One after the other: warps submit to two batches, while others use the array; all wait for both
// words; then all land, and move the rows.
void run_in_phases(Run& run, const Shape& shape) {
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  constexpr uint32_t kRowWords[] = {1, 3, 8, 64};
  const uint32_t threads = shape.warps * kWidth;
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t words = run.random.pick(kRowWords);
    const auto make = [&](bool scatters) {
      const uint32_t rows = 1 + run.random.below(words == 64 ? 8 : 4 * kWidth);
      return RowJob(data, words, rows, scatters, run.random);
    };
    RowJob first = make(false);
    RowJob second = make(!machine.faulty() && run.random.chance(40));
    Stream stream(machine, threads);
    // The last warps use the array in another way.
    const uint32_t submitting = (1 + run.random.below(shape.warps)) * kWidth;
    const bool lands = run.random.chance(50);
    machine.launch([&](Thread& t) {
      if (t.index < submitting) {
        first.submit(t.index, submitting, machine.batch(0));
        second.submit(t.index, submitting, machine.batch(1));
      } else {
        use_otherwise(data, t.random, machine.faulty());
      }
      stream.end_kernel();
      // After a wait that ran out of time, nothing more is known of the machine.
      wait_for(machine, machine.batch(0));
      wait_for(machine, machine.batch(1));
      stream.end_kernel();
      if (t.index == 0) {
        check_ended(machine, machine.batch(0));
        check_ended(machine, machine.batch(1));
      }
      become(t.index, threads);
      if (lands) fw_land_lines(machine.maintenance(0));
      stream.end_kernel();
      if (machine.faulty()) {
        // A row may have bytes of another line if its own cannot be read; an element has none.
        for (uint32_t n = 0; n < 4; ++n) data.load(data.pick(t.random));
        return;
      }
      first.run(t.index, threads);
      second.run(t.index, threads);
    });
    data.check();
    machine.settle();
    if (machine.timed_out()) return;
  }
}

}  // namespace

FW_SCENARIO(split, "rows whose misses are submitted first, while nobody waits on the device") {
  const Shape shape = split_shape(run.random);
  run_in_phases(run, shape);
}

FW_SCENARIO(split_rings, "the same in short rings, which prefetches have filled and left") {
  Shape shape = split_shape(run.random);
  shape.sets = 3;
  shape.lines = 12;
  shape.queues = 1;
  shape.depth_log2 = 1 + run.random.below(2);
  shape.plain = false;
  if (!run.faults_given) {
    // Commands that overtake each other, so that the rings are emptied in parts.
    run.faults.wait = 60;
    run.faults.delay = 1 + run.random.below(30);
  }
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  const uint32_t threads = shape.warps * kWidth;
  for (uint32_t round = 0; round < 2; ++round) {
    RowJob job(data, 64, 4 + run.random.below(8), false, run.random);
    Stream stream(machine, threads);
    machine.launch([&](Thread& t) {
      const uint32_t loads = t.random.below(3);
      for (uint32_t n = 0; n < 3; ++n) {
        const uint32_t i = data.pick(t.random);
        n < loads ? data.load(i) : data.prefetch(i);
      }
      job.submit(t.index, threads, machine.batch(0));
      stream.end_kernel();
      wait_for(machine, machine.batch(0));
      stream.end_kernel();
      if (t.index == 0) check_ended(machine, machine.batch(0));
      job.run(t.index, threads);
    });
    data.check();
    machine.settle();
  }
}

FW_SCENARIO(split_faults, "the same over disks that fail, wait, tear and stop") {
  const Shape shape = split_shape(run.random);
  draw_faults(run);
  if (kWidth == 32) run.faults.errors = std::min(run.faults.errors, 20u);
  run_in_phases(run, shape);
}

FW_SCENARIO(split_streams, "two streams that wait for their batches, beside warps that do not") {
  Shape shape = split_shape(run.random);
  const uint32_t others = kWidth == 32 ? 0 : run.random.below(3);
  const uint32_t warps = kWidth == 32 ? 1 : 1 + run.random.below(2);
  shape.warps = 2 * warps + others;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  constexpr uint32_t kRowWords[] = {1, 3, 8, 64};
  const uint32_t threads = warps * kWidth;
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t words = run.random.pick(kRowWords);
    const auto make = [&] {
      const uint32_t rows = 1 + run.random.below(words == 64 ? 6 : 3 * kWidth);
      return RowJob(data, words, rows, run.random.chance(25), run.random);
    };
    // Each stream submits to its batch twice, as a graph does that is replayed.
    RowJob jobs[2][2] = {{make(), make()}, {make(), make()}};
    Stream streams[2] = {{machine, threads}, {machine, threads}};
    machine.launch([&](Thread& t) {
      const uint32_t s = t.index / threads;
      if (s >= 2) {
        for (uint32_t n = 0; n < 4; ++n) {
          const uint32_t i = data.pick(t.random);
          t.random.chance(30) ? void(data.store(i)) : data.load(i);
        }
        return;
      }
      const uint32_t index = t.index - s * threads;
      fw::nvme::batch& batch = machine.batch(s);
      for (RowJob& job : jobs[s]) {
        job.submit(index, threads, batch);
        streams[s].end_kernel();
        wait_for(machine, batch);
        // Plain, so the newest values.
        if (batch.record->completed != batch.submitted) scheduler.fail("the word came early");
        streams[s].end_kernel();
        job.run(index, threads);
        streams[s].end_kernel();
      }
    });
    data.check();
    machine.settle();
  }
}

FW_SCENARIO(split_stop, "the host gives up its watch while launches submit: no word stays away") {
  Shape shape = split_shape(run.random);
  shape.lines = 6;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  RowJob job(data, 64, 6, false, run.random);
  fw::native::BatchWatch watch({reinterpret_cast<uint64_t>(machine.batch(0).record), 2}, 1);
  const uint32_t threads = shape.warps * kWidth;
  const uint32_t delay = run.random.below(200);
  machine.launch([&](Thread& t) { job.submit(t.index, threads, machine.batch(0)); }, 0,
                 [&] {
                   for (uint32_t n = 0; n < delay && !scheduler.stopping(); ++n) scheduler.yield();
                   watch.end();
                 });
  // As `stop` does: nothing is served any more, and what was submitted stays outstanding.
  machine.serve_nothing(true);
  machine.launch([&](Thread&) { wait_for(machine, machine.batch(0)); }, 1);
  machine.serve_nothing(false);
  machine.launch([&](Thread& t) { job.run(t.index, threads); });
  data.check();
  machine.settle();
}
