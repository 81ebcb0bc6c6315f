// Namespaces that are read in place under a lease, which the host gives up while threads read.
#include <cstring>

#include "simulator/around.h"
#include "simulator/row_job.h"

using namespace fw::simulator;

namespace {

// The byte that a writer leaves in pages after the lease has ended: it is in no element's value.
constexpr uint64_t kRubbish = ~uint64_t(0);

// Begins an epoch, as a lease's keeper does at each break, and when it has the lease again.
void begin_epoch(Machine& machine) {
  for (uint32_t v = 0; v < machine.shape().volumes; ++v) {
    uint32_t* epoch = &machine.volume(v).lease->epoch;
    fw::atomic::store_relaxed_system(epoch, fw::atomic::load_relaxed_system(epoch) + 1);
  }
}

uint32_t namespaces_of(const Shape& shape) {
  return shape.spread == fw::cache::kOneNamespace ? 1 : shape.namespaces;
}

// The pages are the storage's until the lease ends.
void share_pages(Machine& machine) {
  for (uint32_t v = 0; v < machine.shape().volumes; ++v) {
    for (uint32_t n = 0; n < namespaces_of(machine.shape()); ++n) {
      std::memcpy(machine.pages(v, n), machine.storage(v, n), machine.namespace_bytes());
    }
  }
}

// Gives a lease up as its keeper does: first changes the path of every queue pair, then begins an
// epoch, then gives up the lease, after which the pages may have any contents. The storage's bytes
// do not change.
void leave_pages(Machine& machine) {
  const Shape& shape = machine.shape();
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    fw::cache::volume& volume = machine.volume(v);
    for (uint32_t q = 0; q < volume.queue_count; ++q) {
      fw::atomic::store_relaxed_system(&volume.queues[q].data.path, uint32_t(fw::nvme::kBounce));
    }
  }
  fw::atomic::fence_system();
  begin_epoch(machine);
  fw::atomic::fence_system();
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    for (uint32_t n = 0; n < namespaces_of(shape); ++n) {
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
  const auto volumes = elements_of(machine);
  share_pages(machine);
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
        const uint32_t dice = t.random.below(100);
        if (dice < 70) {
          data.load(i);
        } else if (dice < 80) {
          fw::refresh(data.array());
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

// Gathers of a pipeline, which read what is in no frame from the pages themselves.
void stream_while_left(Run& run, Shape shape) {
  shape.path = fw::nvme::kInPlace;
  shape.leased = true;
  shape.plain = true;
  shape.volumes = 1;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  share_pages(machine);
  machine.beside([&](Random& random) {
    for (uint32_t n = random.below(60); n != 0; --n) scheduler.yield();
    leave_pages(machine);
  });
  for (uint32_t round = 0; round < 2; ++round) {
    RowJob gather(data, 8, 1 + run.random.below(2 * kWidth), false, run.random);
    gather.streams();
    const uint32_t gathering = (1 + run.random.below(shape.warps)) * kWidth;
    machine.launch([&](Thread& t) {
      if (t.index < gathering) return gather.run(t.index, gathering);
      data.load(data.pick(t.random));
    });
    machine.beside(nullptr);
    data.check();
    machine.settle();
  }
}

// Reads of a file around the cache.
void read_around_while_left(Run& run, Shape shape) {
  shape.path = fw::nvme::kInPlace;
  shape.leased = true;
  shape.volumes = 1;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  share_pages(machine);
  machine.beside([&](Random& random) {
    for (uint32_t n = random.below(60); n != 0; --n) scheduler.yield();
    leave_pages(machine);
  });
  const uint32_t operations = kWidth == 1 ? 2 + run.random.below(5) : 1 + run.random.below(3);
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t i = data.pick(t.random);
      t.random.chance(80) ? load_around(machine, data, i) : data.load(i);
    }
  });
  machine.beside(nullptr);
  data.check();
  machine.settle();
}

// What a graph replays: kernels of the library, and a kernel of the user's that refreshes. They
// leave lines in the cache, and prefetches in flight.
void replay(Machine& machine, Elements<>& data, Random& random) {
  const Shape& shape = machine.shape();
  const uint32_t gathering = random.below(shape.warps + 1) * kWidth;
  constexpr uint32_t kRowWords[] = {1, 8};
  RowJob gather(data, random.pick(kRowWords), 1 + random.below(kWidth + 4), false, random);
  if (random.chance(30)) gather.streams();
  machine.launch([&](Thread& t) {
    if (t.index < gathering) return gather.run(t.index, gathering);
    fw::refresh(data.array());
    for (uint32_t n = 0; n < (kWidth == 1 ? 6 : 2); ++n) {
      const uint32_t i = data.pick(t.random);
      if (t.random.chance(60)) {
        data.load(i);
      } else {
        data.prefetch(i);
      }
    }
  });
  data.check();
}

// Another program writes the file between replays, and the host's threads make no call.
void replay_rewritten(Run& run, Shape shape) {
  shape.path = fw::nvme::kInPlace;
  shape.leased = true;
  shape.volumes = 1;
  shape.lines = 12;
  // Several chunks of frames to sweep, where a warp has one lane.
  shape.sets = 1 + run.random.below(12);
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  share_pages(machine);
  for (uint32_t turn = 0; turn < 3; ++turn) {
    if (turn != 0) {
      const auto change = [&] { turn == 1 ? leave_pages(machine) : begin_epoch(machine); };
      machine.launch([](Thread&) {}, 1, change);
      data.restart();
    }
    replay(machine, data, run.random);
  }
  machine.settle();
}

}  // namespace

FW_SCENARIO(leases_replayed, "launches after a writer has come, with old lines in the cache") {
  replay_rewritten(run, Shape::draw(run.random));
}

FW_SCENARIO(leases_replayed_spread, "the same over stripes or replicas on two or three drives") {
  Shape shape = Shape::draw(run.random);
  shape.spread = run.random.chance(50) ? fw::cache::kStriped : fw::cache::kReplicated;
  shape.namespaces = 2 + run.random.below(2);
  shape.stripe_lines = 1 + run.random.below(3);
  replay_rewritten(run, shape);
}

FW_SCENARIO(leases, "loads and prefetches in place, while the host gives the pages up") {
  read_while_left(run, Shape::draw(run.random));
}

FW_SCENARIO(leases_streamed, "gathers around the cache, while the host gives the pages up") {
  stream_while_left(run, Shape::draw(run.random));
}

FW_SCENARIO(leases_around, "reads of a file around the cache, while the host gives the pages up") {
  read_around_while_left(run, Shape::draw(run.random));
}

FW_SCENARIO(leases_spread, "the same over stripes or replicas on two or three drives") {
  Shape shape = Shape::draw(run.random);
  shape.spread = run.random.chance(50) ? fw::cache::kStriped : fw::cache::kReplicated;
  shape.namespaces = 2 + run.random.below(2);
  shape.stripe_lines = 1 + run.random.below(3);
  read_while_left(run, shape);
}
