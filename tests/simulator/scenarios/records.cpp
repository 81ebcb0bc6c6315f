// The sequences of failures: kernels append while the host reads, and nothing gets lost or doubled.
#include <map>

#include "flashwarp/array.cuh"
#include "simulator/machine.h"

using namespace fw::simulator;
using fw::cache::kFailuresKept;

namespace {

// What the host does with one sequence, as `FailureSequence` of flashwarp/cache.py does it.
class Reader {
 public:
  Reader(fw::cache::failure_log& log, fw::cache::failure* entries, const char* name)
      : log_(log), entries_(entries), name_(name) {}

  void read() {
    const uint32_t before = read_;
    while (read_ - before < kFailuresKept) {
      const fw::cache::failure& entry = entries_[read_ % kFailuresKept];
      if (fw::atomic::load_relaxed_system(&entry.number) != read_ + 1) break;
      // The entry after its number.
      fw::atomic::fence_system();
      const uint64_t where = fw::atomic::load_plain(&entry.where);
      const uint32_t status = fw::atomic::load_plain(&entry.status);
      if (++seen_[where] != 1) scheduler.fail(name_ + ": a failure is told twice");
      if (status != uint32_t(where) + 1) scheduler.fail(name_ + ": a failure is told in part");
      ++read_;
    }
    // What was read before it is free.
    fw::atomic::fence_system();
    if (read_ != before) fw::atomic::store_relaxed_system(&log_.read, read_);
    if (read_ >= kFailuresKept) untold_ = fw::atomic::load_relaxed(&log_.untold);
  }

  // After all launches.
  void check(uint32_t made) {
    read();
    if (read_ + untold_ == made) return;
    throw Failure(std::string(name_) + ": " + std::to_string(made) + " failures, of which " +
                  std::to_string(read_) + " were told and " + std::to_string(untold_) +
                  " counted\n");
  }

 private:
  fw::cache::failure_log& log_;
  fw::cache::failure* entries_;
  const std::string name_;
  std::map<uint64_t, uint32_t> seen_;
  uint32_t read_ = 0;
  uint32_t untold_ = 0;
};

}  // namespace

FW_SCENARIO(records, "threads note failures while the host reads them") {
  Shape shape;
  shape.warps = kWidth == 1 ? 2 + run.random.below(3) : 1;
  Machine machine(run, shape);
  fw::cache::volume& v = machine.volume();
  Reader commands(v.commands, v.errors->commands, "commands");
  Reader indices(v.indices, v.errors->indices, "indices");
  const uint32_t each = 1 + run.random.below(kWidth == 1 ? 6 : 2);
  const uint32_t reads = 1 + run.random.below(12);
  const uint32_t rounds = 1 + run.random.below(3);
  for (uint32_t round = 0; round < rounds; ++round) {
    machine.launch(
        [&](Thread& t) {
          for (uint32_t n = 0; n < each; ++n) {
            const uint32_t number = (round * machine.shape().warps * kWidth + t.index) * each + n;
            fw::cache::record_error(v, number + 1, fw::nvme::kRead, v.line_begin + number);
            // Its status says nothing to the host; here it tells a torn entry.
            fw::cache::note_failure(v.indices, v.errors->indices, number, number + 1, 0);
          }
        },
        0,
        [&] {
          for (uint32_t n = 0; n < reads && !scheduler.stopping(); ++n) {
            commands.read();
            indices.read();
            scheduler.yield();
          }
        });
  }
  const uint32_t made = rounds * machine.shape().warps * kWidth * each;
  commands.check(made);
  indices.check(made);
}
