// Queue pairs alone: warps submit commands, wait for them and free their slots.
#include "simulator/machine.h"

using namespace fw::simulator;

namespace {

// Reads one line a lane and looks at the data. Returns when the slots are free again.
void read_lines(Machine& machine, fw::nvme::queue_pair& q, uint32_t line) {
  namespace nvme = fw::nvme;
  fw::cache::line_finisher finisher{machine.line_cache()};
  const auto here = fw::lanes::all();
  const auto members = here.below(machine.shape().depth_log2 == 1 ? 2 : 4);
  const bool mine = members.mine();
  const uint32_t ticket = nvme::take_tickets(q, here, members);
  if (!nvme::wait_for_slots(q, here, members, ticket, finisher)) scheduler.fail("no slot");
  const uint64_t buffer = nvme::buffer_of(q, ticket);
  if (mine) {
    const uint16_t cid = uint16_t(nvme::entry_of(q, ticket));
    nvme::write_entry(q, ticket, nvme::block_command(nvme::kRead, cid, line, 1, buffer, 0), 0);
  }
  here.sync();
  nvme::publish(q, here);
  const uint32_t status = nvme::wait_for_completions(q, here, members, ticket, finisher);
  if (!mine) return;
  if (status != nvme::kSuccess) scheduler.fail("a read failed without a fault");
  const auto* data = reinterpret_cast<const uint64_t*>(buffer);
  for (uint32_t i = 0; i < 2; ++i) {
    if (fw::atomic::load_plain(&data[i]) != (uint64_t(line) << 32 | (i + 1))) {
      scheduler.fail("a command brought another line");
    }
  }
  nvme::release_slot(q, ticket);
}

void use_queue(Run& run, const Shape& shape, uint32_t turns) {
  Machine machine(run, shape);
  auto* stored = reinterpret_cast<uint64_t*>(machine.storage());
  for (uint32_t line = 0; line < shape.lines; ++line) {
    for (uint32_t i = 0; i < 2; ++i) stored[line * 64 + i] = uint64_t(line) << 32 | (i + 1);
  }
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < turns; ++n) {
      fw::nvme::queue_pair* queues = machine.volume().queues;
      // The queue is the warp's choice, the line each lane's own.
      fw::nvme::queue_pair& q = queues[(t.warp + n) % shape.queues];
      read_lines(machine, q, t.random.below(shape.lines));
    }
  });
  machine.settle();
}

}  // namespace

FW_SCENARIO(queue, "raw commands through rings of a few entries") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.path = fw::nvme::kBounce;
  use_queue(run, shape, 1 + run.random.below(6));
}

FW_SCENARIO(ring, "two warps, two commands each, a ring of two: for every schedule") {
  Shape shape;
  shape.path = fw::nvme::kBounce;
  use_queue(run, shape, 2);
}
