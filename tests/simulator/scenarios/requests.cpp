// A client of a shared cache whose threads ask the owner, and the owner's thread that serves them.
#include "flashwarp/cache/owner_access.cuh"
#include "simulator/row_job.h"

using namespace fw::simulator;
using namespace fw::cache;

namespace {

// A client's own structures. Tags and frames are the machine's.
class Client {
 public:
  Client(Machine& machine, uint32_t slots) : machine_(machine) {
    auto* requests = machine.allocate<owner_requests>(1, "requests", Sharing::kAtomic, 4);
    requests->bell = machine.allocate<request_bell>(1, "bell", Sharing::kAtomic, 4);
    requests->slots = machine.allocate<request_slot>(slots, "slots", Sharing::kAtomic, 4);
    requests->buffers = machine.allocate<char>(slots * kLineBytes, "request buffers");
    requests->buffer_bytes = kLineBytes;
    requests->holders = machine.allocate<uint32_t>(slots, "holders", Sharing::kAtomic);
    requests->count = slots;
    // Waits of the client end by its host's word, in a queue pair that nobody submits to.
    auto* queue = machine.allocate<fw::nvme::queue_pair>(1, "no queue", Sharing::kAtomic, 4);
    queue->depth_log2 = 1;
    queue->data.timeout_ns = Machine::kFairTimeoutNs;
    cache_.geometry = machine.line_cache().geometry;
    cache_.volumes = machine.allocate<volume>(1, "volumes of the client", Sharing::kAtomic, 4);
    cache_.volume_end = 1;
    cache_.owner = requests;
    volume& v = cache_.volumes[0];
    v = machine.volume();
    v.queues = queue;
    v.queue_count = 1;
    v.spread = kOneNamespace;
    v.lease = nullptr;
    v.events = machine.allocate<counters>(kCounterShards, "counters", Sharing::kAtomic);
    v.errors = machine.allocate<error_record>(1, "errors");
  }

  owner_requests& requests() { return *cache_.owner; }
  const volume& entry() const { return cache_.volumes[0]; }
  fw::array<uint64_t> array() {
    fw::array<uint64_t> a = machine_.array<uint64_t>();
    a.cache = &cache_;
    a.volume = &cache_.volumes[0];
    return a;
  }

 private:
  Machine& machine_;
  line_cache cache_ = {};
};

// Moves a part of a line between a frame of the owner's and a buffer, as its kernels do.
template <bool kToFrame>
struct serve_part {
  static constexpr bool kStores = kToFrame;
  uint64_t offset;
  uint64_t bytes;
  uint64_t buffer;

  void visit(fw::lanes here, fw::lanes members, uint64_t frame) {
    if (!members) return;
    const uint64_t inside = frame + offset;
    fw::warp::copy<kToFrame ? fw::warp::source::kStream : fw::warp::source::kFrame>(
        here, kToFrame ? inside : buffer, kToFrame ? buffer : inside, bytes);
  }
};

// The owner's thread, which serves until no thread of the client is left. By one lane.
class Owner {
 public:
  Owner(Machine& machine, Client& client) : machine_(machine), client_(client) {}

  void serve(const uint32_t* running) {
    owner_requests& o = client_.requests();
    std::vector<asked_request> found(o.count);
    while (true) {
      const bool last = fw::atomic::load_acquire(running) == 0;
      const uint32_t count = look_for_requests(o.slots, o.count, found.data());
      for (uint32_t i = 0; i < count; ++i) answer_one(o, found[i]);
      if (count == 0 && last) return;
      if (count == 0) fw::base::pause(fw::nvme::kBackOffNs);
    }
  }

 private:
  void answer_one(owner_requests& o, const asked_request& asked) {
    line_cache& c = machine_.line_cache();
    volume& v = machine_.volume();
    const fw::lanes here = fw::lanes::of(fw::warp::lane());
    const uint64_t line = asked.begin >> kLineShift;
    const uint64_t offset = asked.begin & (kLineBytes - 1);
    const uint64_t buffer = reinterpret_cast<uint64_t>(buffer_of(o, asked.slot));
    tally events;
    uint32_t status = 0;
    if (line >= v.line_count || asked.bytes > kLineBytes - offset) {
      scheduler.fail("the owner sees a request that nobody made");
    }
    if (asked.operation == kOwnerPrefetch) {
      prefetch<fw::policy>(c, v, here, true, line, events);
    } else if (asked.operation == kOwnerRead) {
      serve_part<false> op = {offset, asked.bytes, buffer};
      status = access<fw::policy>({c.geometry, c, v, here}, {line}, op, events);
    } else {
      serve_part<true> op = {offset, asked.bytes, buffer};
      status = access<fw::policy>({c.geometry, c, v, here}, {line}, op, events);
    }
    answer_request(o.slots[asked.slot], status);
  }

  Machine& machine_;
  Client& client_;
};

// A thread of the client that ends in the middle of a request, for whose answer nobody waits.
void die(owner_requests& o, Random& random, uint32_t lines) {
  const uint32_t slot = take_slot(o);
  if (slot == kNoSlot || random.chance(30)) return;
  ask(o, slot, kOwnerRead, uint64_t(random.below(lines - 1)) << kLineShift, kLineBytes);
}

}  // namespace

FW_SCENARIO(requests, "a client's threads ask the owner, while its own threads store and evict") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.sets = 1;
  shape.lines = 5 + run.random.below(8);
  shape.warps = kWidth == 1 ? 4 : 3;
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  const uint32_t slots = 1 + run.random.below(3);
  const uint32_t deaths = run.random.below(slots);
  constexpr uint32_t kHints[] = {10, 60};
  const uint32_t hints = run.random.pick(kHints);
  Client client(machine, slots);
  const fw::array<uint64_t> theirs = client.array();
  auto* const running = machine.allocate<uint32_t>(1, "running", Sharing::kAtomic);
  const uint32_t operations = kWidth == 32 ? 2 : 4;
  for (uint32_t round = 0; round < 2; ++round) {
    *running = (shape.warps - 2) * kWidth;
    uint32_t dying = round == 0 ? deaths : 0;
    constexpr uint32_t kRowWords[] = {1, 3, 8, 64};
    const uint32_t words = run.random.pick(kRowWords);
    const bool rows = run.random.chance(50);
    RowJob gather(data, words, 1 + run.random.below(4), false, run.random);
    RowJob scatter(data, words, 1 + run.random.below(4), true, run.random);
    gather.by_client(theirs);
    scatter.by_client(theirs);
    machine.launch([&](Thread& t) {
      if (t.warp == 0) {
        if (t.lane == 0) Owner(machine, client).serve(running);
        return;
      }
      if (t.warp == 2 && rows) {
        scatter.run(t.lane, kWidth);
        gather.run(t.lane, kWidth);
        become(t.index, shape.warps * kWidth);
      }
      for (uint32_t n = 0; n < operations; ++n) {
        if (t.warp == 1) {
          data.use(t.random);
          continue;
        }
        if (dying != 0) {
          --dying;
          die(client.requests(), t.random, shape.lines);
        }
        const uint32_t i = data.pick(t.random);
        const uint32_t dice = t.random.below(100);
        if (dice < hints) {
          theirs.prefetch(i);
        } else if (dice < 80) {
          data.load_by(i, "client's load", [&](uint32_t j) { return theirs[j]; });
        } else {
          data.store_by(i, "client's store", [&](uint32_t j, uint64_t value) {
            fw::detail::store_element<8> op = {theirs.offset_of(j), value};
            return fw::detail::access_slow(theirs.cache, theirs.volume, theirs.line_of(j), op,
                                           false);
          });
        }
      }
      if (t.warp != 1) fw::atomic::add_release(running, ~0u);
    });
    if (client.entry().commands.noted != 0) scheduler.fail("a request failed without a fault");
    data.check();
    machine.settle();
  }
}
