// A model of a drive: it computes when the drive would complete a command.
//
// The result depends only on the commands, their arrival times and the seed, not on a clock or a
// thread, so tests can run it in model time. A command passes two stages, which reads and writes
// share:
//   1. the pipe, one for the drive, for the time that the drive's ceilings in commands and in bytes
//      per second imply: the longer of the two;
//   2. a unit, the first of N to be free, for a service time drawn by the command's number.
// So saturation, queueing and latency under load are results and not parameters. `ModelledDrive` is
// the model behind a lock, for threads that share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "flashwarp/nvme/command.cuh"

namespace fw::native {

// How a drive handles reads, or writes.
struct SsdDirection {
  // Commands per second at block sizes in bytes, ascending. In between, the time of a command is
  // linear in the size; outside it is constant, and bytes_per_s limits large blocks.
  std::vector<std::pair<uint32_t, double>> ceilings;
  double bytes_per_s = 0;
  // Service times in nanoseconds at evenly spaced quantiles, from the least to the greatest.
  std::vector<float> service_ns;
};

struct SsdParameters {
  SsdDirection read, write;
  uint32_t units = 1;
  uint64_t seed = 1;
};

class SsdModel {
 public:
  // Throws invalid_argument for a value that is not possible.
  explicit SsdModel(const SsdParameters& parameters);

  // Admits one command of `blocks` LBAs. Returns its time of completion. Commands arrive in the
  // order of the calls: an earlier time than the last command's counts as that command's time.
  int64_t admit(int64_t now_ns, bool is_write, uint32_t blocks);

 private:
  // Tables of a direction for admit(), by LBAs and by quantile. Ticks are 2^-20 ns.
  static constexpr uint32_t kTableBlocks = 64;
  struct Direction {
    explicit Direction(const SsdDirection& from);
    uint64_t pipe_ticks(uint32_t blocks) const;
    uint32_t service_ns(uint64_t chance) const;

    double command_ticks;  // a command beyond the table takes this, or block_ticks for each LBA:
    double block_ticks;    // the longer of the two
    uint64_t table_ticks[kTableBlocks + 1];
    std::vector<uint32_t> quantiles_ns;
  };

  int64_t pass_pipe(int64_t now_ns, uint64_t ticks);
  int64_t occupy_unit(int64_t ready_ns, uint32_t service_ns);

  const Direction read_, write_;
  const uint64_t seed_;
  uint64_t number_ = 0;  // commands so far
  int64_t pipe_ns_ = 0;  // when the pipe is free: nanoseconds, and ticks beyond
  uint64_t pipe_fraction_ = 0;
  std::vector<int64_t> units_;  // when each is free: a heap with the earliest at the root
};

// One drive for all queue pairs of a controller. Any thread; no thread waits while it has the lock.
class ModelledDrive {
 public:
  struct Arrival {
    uint32_t blocks;
    bool is_write;
  };

  explicit ModelledDrive(const SsdParameters& parameters) : model_(parameters) {}

  // Writes the time of completion of each arrival to `due_ns`, which has room for all.
  void admit(int64_t now_ns, std::span<const Arrival> arrivals, int64_t* due_ns);

 private:
  alignas(128) uint32_t lock_ = 0;
  SsdModel model_;
};

}  // namespace fw::native
