// A modelled drive: when would it have completed a command that reaches it now?
//
// A pure function of the commands and their arrival times: no clock, no thread, and no chance but
// the seed's, so that a test can drive it through model time. A command passes two stages:
//   1. the pipe, one for the drive, which takes each command for as long as its ceiling in commands
//      and bytes per second says: the slower of the two;
//   2. a unit, the first of N to be free, for the service time that the command's number draws.
// So saturation, queueing and latency under load are not parameters; they come out. Reads and
// writes share both stages. `ModelledDrive` is the same behind a lock, for threads that share it.
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
  // Commands per second at block sizes in bytes, ascending; linear in the time of a command in
  // between, and constant outside, where bytes_per_s takes over.
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
  // Throws invalid_argument when a value cannot be.
  explicit SsdModel(const SsdParameters& parameters);

  // Takes one command of `blocks` LBAs in; returns when it is complete. Commands arrive in the
  // order of the calls; one that claims to come earlier than its predecessor came with it.
  int64_t admit(int64_t now_ns, bool is_write, uint32_t blocks);

 private:
  // A direction as admit() wants it: tables by LBAs and by chance. Ticks are 2^-20 ns.
  static constexpr uint32_t kTableBlocks = 64;
  struct Direction {
    explicit Direction(const SsdDirection& from);
    uint64_t pipe_ticks(uint32_t blocks) const;
    uint32_t service_ns(uint64_t chance) const;

    double command_ticks;  // of a command beyond the table, and of one of its LBAs: the greater
    double block_ticks;
    uint64_t table_ticks[kTableBlocks + 1];
    std::vector<uint32_t> quantiles_ns;
  };

  int64_t pass_pipe(int64_t now_ns, uint64_t ticks);
  int64_t occupy_unit(int64_t ready_ns, uint32_t service_ns);

  const Direction read_, write_;
  const uint64_t seed_;
  uint64_t number_ = 0;  // commands so far
  int64_t pipe_ns_ = 0;  // when the pipe is free, and the ticks of a nanosecond beyond
  uint64_t pipe_fraction_ = 0;
  std::vector<int64_t> units_;  // when each is free: a heap with the first at the root
};

// One drive for all queue pairs of a controller. Any thread; nobody waits with the lock held.
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
