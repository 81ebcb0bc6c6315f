// Namespaces that are read in place under a lease, which the host gives up while threads read.
#include <cstring>

#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

// The byte that a writer leaves in pages after the lease has ended: it is in no element's value.
constexpr uint64_t kRubbish = ~uint64_t(0);

// Gives a lease up as its keeper does: first changes the path of every queue pair, then gives up
// the lease, after which the pages may have any contents. The storage's bytes do not change.
void leave_pages(Machine& machine) {
  const Shape& shape = machine.shape();
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    fw::cache::volume& volume = machine.volume(v);
    for (uint32_t q = 0; q < volume.queue_count; ++q) {
      fw::atomic::store_relaxed_system(&volume.queues[q].data.path, uint32_t(fw::nvme::kBounce));
    }
  }
  fw::atomic::fence_system();
  const uint32_t namespaces = shape.spread == fw::cache::kOneNamespace ? 1 : shape.namespaces;
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    for (uint32_t n = 0; n < namespaces; ++n) {
      auto* pages = reinterpret_cast<uint64_t*>(machine.pages(v, n));
      for (uint64_t i = 0; i < machine.namespace_bytes() / 8; ++i) {
        fw::atomic::store_relaxed_system(&pages[i], kRubbish);
      }
    }
  }
}

void read_while_left(Run& run, Shape shape) {
  shape.path = fw::nvme::kInPlace;
  shape.leased = true;
  Machine machine(run, shape);
  std::vector<std::unique_ptr<Elements<>>> volumes;
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    volumes.push_back(std::make_unique<Elements<>>(machine, v));
    const uint32_t namespaces = shape.spread == fw::cache::kOneNamespace ? 1 : shape.namespaces;
    for (uint32_t n = 0; n < namespaces; ++n) {
      std::memcpy(machine.pages(v, n), machine.storage(v, n), machine.namespace_bytes());
    }
  }
  machine.beside([&](Random& random) {
    for (uint32_t n = random.below(60); n != 0; --n) scheduler.yield();
    leave_pages(machine);
  });
  const uint32_t operations = kWidth == 1 ? 2 + run.random.below(5) : 1 + run.random.below(3);
  for (uint32_t round = 0; round < 2; ++round) {
    machine.launch([&](Thread& t) {
      for (uint32_t n = 0; n < operations; ++n) {
        Elements<>& data = *volumes[t.random.below(shape.volumes)];
        const uint32_t i = data.pick(t.random);
        if (t.random.chance(75)) {
          data.load(i);
        } else {
          data.prefetch(i);
        }
      }
    });
    machine.beside(nullptr);
    for (auto& data : volumes) data->check();
    machine.settle();
  }
}

}  // namespace

FW_SCENARIO(leases, "loads and prefetches in place, while the host gives the pages up") {
  read_while_left(run, Shape::draw(run.random));
}

FW_SCENARIO(leases_spread, "the same over stripes or replicas on two or three drives") {
  Shape shape = Shape::draw(run.random);
  shape.spread = run.random.chance(50) ? fw::cache::kStriped : fw::cache::kReplicated;
  shape.namespaces = 2 + run.random.below(2);
  shape.stripe_lines = 1 + run.random.below(3);
  read_while_left(run, shape);
}
