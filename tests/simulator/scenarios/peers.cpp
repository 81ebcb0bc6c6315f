// GPUs that share a cache: each has queues of its own, and helps no other's.
#include "simulator/elements.h"

using namespace fw::simulator;
namespace cache = fw::cache;

namespace {

// The second GPU of a machine: the cache's tags, frames and locks, and queues to a namespace that
// holds the same bytes as the first one's. To its kernels they are the same lines.
class Peer {
 public:
  explicit Peer(Machine& machine) : cache_(machine.line_cache()) {
    const uint64_t bytes = machine.array<uint64_t>(0).length * 8;
    std::copy_n(machine.stored(0, 0), bytes, machine.stored(1, 0));
    cache_.volumes =
        machine.allocate<cache::volume>(cache::kVolumesMax, "peer's volumes", Sharing::kAtomic, 4);
    cache_.volumes[0] = machine.volume(1);
    cache_.volumes[0].line_begin = machine.volume(0).line_begin;
    cache_.volume_end = 1;
    machine.volume(1).attached = 0;  // nobody helps its queues by the first one's table
    array_ = machine.array<uint64_t>(0);
    array_.cache = &cache_;
    array_.volume = &cache_.volumes[0];
  }
  Peer(const Peer&) = delete;

  const fw::array<uint64_t>& array() const { return array_; }

 private:
  cache::line_cache cache_;
  fw::array<uint64_t> array_;
};

}  // namespace

FW_SCENARIO(peers,
            "two GPUs read the lines of one cache, and evict what the other one has filled") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 2;
  shape.leased = false;
  shape.warps = kWidth == 32 ? 2 : 4;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  Peer peer(machine);
  const bool in_place = shape.path == fw::nvme::kInPlace && shape.plain && !shape.parts;
  for (uint32_t round = 0; round < 2; ++round) {
    machine.launch([&](Thread& t) {
      const bool first = t.warp % 2 == 0;
      for (uint32_t n = 0; n < 5; ++n) {
        const uint32_t i = data.pick(t.random);
        // By commands a prefetch starts nothing there: see `base::kGpusShare`.
        if (in_place && t.random.chance(20)) {
          first ? data.prefetch(i) : peer.array().prefetch(i);
        } else if (first) {
          data.load(i);
        } else {
          data.load_by(i, "load of the peer", [&](uint32_t j) { return peer.array()[j]; });
        }
      }
    });
    data.check();
    machine.settle();
  }
}
