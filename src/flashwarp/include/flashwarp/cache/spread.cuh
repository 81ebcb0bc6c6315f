// Transfers of a volume of several namespaces: a warp submits to all of them before it waits.
//
// So the warp may hold slots of one ring while it waits for slots of another. No cycle of such
// waits can close, because of two rules. The warp takes slots in the order of the volume's table of
// queue pairs. Once it waits for completions, it frees the slots of each ring as soon as its
// commands on that ring are done. Hence warps that wait for slots of the last ring wait for warps
// that wait for completions only; those of the ring before wait for these; and so on.
#pragma once

#include "flashwarp/cache/line_command.cuh"

namespace fw::cache {

// The replica that a read of `line` asks, among those not in `tried`; kNamespacesMax if none is
// left. Each line has a favourite, so that the replicas share the reads and each caches a part of
// its own. Replicas that have stopped answering come last.
FW_DEVICE uint32_t choose_replica(const volume& v, uint32_t seat, uint64_t line, uint32_t tried) {
  // Fibonacci hashing, so that strides which the count divides do not all favour one replica. Take
  // the high bits: the low bits of the product keep the zeros of a multiple of a power of two.
  const uint64_t hash = (line * 0x9E3779B97F4A7C15ull) >> 32;
  const uint32_t favourite = uint32_t((hash * v.namespace_count) >> 32);
  uint32_t silent = kNamespacesMax;
  for (uint32_t i = 0; i < v.namespace_count; i++) {
    const uint32_t n = (favourite + i) % v.namespace_count;
    if ((tried >> n) & 1) continue;
    if (atomic::load_relaxed(&queue_on(v, seat, n).failed) == 0) return n;
    if (silent == kNamespacesMax) silent = n;
  }
  return silent;
}

// The namespaces that a lane's command goes to, as bits. A write goes to all replicas. A read goes
// to one that it has not `tried`; there may be none left.
FW_DEVICE_NOINLINE uint32_t targets_of(const volume& v, uint32_t seat, uint32_t opcode,
                                       uint64_t line, uint32_t tried) {
  if (v.spread == kStriped) return tried != 0 ? 0 : 1u << striped(v, line - v.line_begin).on;
  if (opcode == nvme::kWrite) return tried != 0 ? 0 : (1u << v.namespace_count) - 1;
  const uint32_t n = choose_replica(v, seat, line, tried);
  return n == kNamespacesMax ? 0 : 1u << n;
}

// What a lane has in flight.
struct flights {
  uint32_t seat;    // of all lanes: it chooses the rings
  uint32_t on;      // namespaces, as bits
  uint32_t leased;  // those where the lane reads in place under a lease
  uint32_t tickets[kNamespacesMax];
};

// Submits the lanes' commands to the namespaces of `targets`, in the order of their rings, and
// takes out of `targets` what it submitted. Each ring gets at most as many commands as it has
// slots. Returns the status of commands for which no slot came free.
FW_DEVICE_NOINLINE uint32_t submit_spread(line_cache& c, volume& v, lanes here, uint32_t& targets,
                                          uint8_t opcode, const transfer& t, flights& f) {
  uint32_t status = nvme::kSuccess;
  f.on = 0;
  f.leased = 0;
  for (uint32_t n = 0; n < v.namespace_count; n++) {
    const lanes members = here.ballot(((targets >> n) & 1) != 0);
    if (!members) continue;
    nvme::queue_pair& q = queue_on(v, f.seat, n);
    const lanes bundle = first_bundle(q, members);
    const bool mine = bundle.mine();
    if (mine) targets &= ~(1u << n);
    line_request r = {c, v, q, here, bundle, opcode, t, 0, 0};
    const bool sent = submit_lines(r, false);
    f.tickets[n] = r.ticket;
    if (mine && sent) f.on |= 1u << n;
    if (mine && sent && q.data.leased != 0 && r.address != nvme::buffer_of(q, r.ticket)) {
      f.leased |= 1u << n;
    }
    if (mine && !sent) status = nvme::kTimedOut;
  }
  return status;
}

// The lane's commands in flight that are done, as bits.
FW_DEVICE uint32_t done_flights(const volume& v, const flights& f) {
  uint32_t done = 0;
  for (uint32_t rest = f.on; rest != 0; rest &= rest - 1) {
    const uint32_t n = base::lowest_bit(rest);
    const nvme::queue_pair& q = queue_on(v, f.seat, n);
    // Acquire: pairs with the drainer's release, which comes after the controller's data.
    const uint64_t word = atomic::load_acquire(&q.slots[nvme::entry_of(q, f.tickets[n])]);
    if (nvme::slot::phase_of(word) == nvme::slot::kDone) done |= 1u << n;
  }
  return done;
}

// Ends the commands on one namespace, which are done or given up. Returns the lane's status;
// `again` says whether the lane must read once more.
FW_DEVICE_NOINLINE uint32_t end_flight(line_request& r, bool leased, bool done, bool& again) {
  uint32_t status = nvme::kSuccess;
  if (r.members.mine()) {
    const uint64_t word = atomic::load_relaxed(&r.q.slots[nvme::entry_of(r.q, r.ticket)]);
    status = done ? nvme::slot::status_of(word) : nvme::kTimedOut;
    if (r.opcode == nvme::kRead) {
      const uint32_t path = leased ? uint32_t(nvme::kInPlace) : nvme::path_of(r.q);
      r.address = data_address(r.c, r.v, r.q, path, r.ticket, r.t);
    }
  }
  again = end_lines(r, status).mine();
  return status;
}

// Waits for what is in flight, on all namespaces at a time. Frees the slots of each ring as soon as
// the warp's commands there are done, whatever the other rings do, because another warp may wait
// for these slots while it holds slots of the other rings. Puts namespaces that the lane must ask
// once more into `targets`.
FW_DEVICE_NOINLINE uint32_t wait_for_flights(line_cache& c, volume& v, lanes here,
                                             uint32_t& targets, uint8_t opcode, const transfer& t,
                                             flights& f) {
  line_finisher finisher{c};
  nvme::deadline limit(v.queues[0].data);
  uint32_t status = nvme::kSuccess;
  while (here.any(f.on != 0)) {
    const uint32_t done = done_flights(v, f);
    const bool late = here.any(limit.passed());
    bool moved = false;
    for (uint32_t n = 0; n < v.namespace_count; n++) {
      const bool mine = (f.on >> n) & 1;
      const lanes bundle = here.ballot(mine);
      if (!bundle) continue;
      nvme::queue_pair& q = queue_on(v, f.seat, n);
      if (here.any(mine && ((done >> n) & 1) == 0)) {
        const bool dead = here.any(late || atomic::load_relaxed(&q.failed) != 0);
        if (!dead) {
          moved = nvme::drain(q, here, finisher) != 0 || moved;
          continue;
        }
        atomic::store_relaxed(&q.failed, 1u);
      }
      line_request r = {c, v, q, here, bundle, opcode, t, f.tickets[n], 0};
      const bool leased = (f.leased >> n) & 1;
      bool again;
      const uint32_t got = end_flight(r, leased, ((done >> n) & 1) != 0, again);
      if (again) {
        targets |= 1u << n;
      } else if (mine) {
        status = worse_of(status, got);
      }
      if (mine) f.on &= ~(1u << n);
      moved = true;
    }
    if (!moved) base::pause(nvme::kBackOffNs);
  }
  return status;
}

// Moves the lane's line to or from each namespace in `targets`. Returns the worst status of the
// lane's commands.
FW_DEVICE uint32_t move_to(line_cache& c, volume& v, uint32_t seat, lanes here, uint32_t targets,
                           uint8_t opcode, const transfer& t) {
  uint32_t status = nvme::kSuccess;
  while (here.any(targets != 0)) {
    flights f;
    f.seat = seat;
    status = worse_of(status, submit_spread(c, v, here, targets, opcode, t, f));
    status = worse_of(status, wait_for_flights(c, v, here, targets, opcode, t, f));
  }
  return status;
}

// As `move_in_place`, on the namespaces in `targets`; takes out of `targets` what was moved.
FW_DEVICE uint32_t move_targets_in_place(const line_cache& c, const volume& v, uint32_t seat,
                                         lanes here, uint32_t targets, uint8_t opcode,
                                         const transfer& t) {
  for (uint32_t n = 0; n < v.namespace_count; n++) {
    const lanes on = here.ballot(((targets >> n) & 1) != 0);
    if (!on) continue;
    const lanes left = move_in_place(c, v, queue_on(v, seat, n), here, on, opcode, t);
    if (!left.mine()) targets &= ~(1u << n);
  }
  return targets;
}

// As `move_lines`. A read that fails on one replica asks the next.
FW_DEVICE_NOINLINE uint32_t move_lines_spread(line_cache& c, volume& v, lanes here, lanes members,
                                              uint8_t opcode, const transfer& t) {
  const uint32_t seat = take_seat(here);
  uint32_t status = nvme::kSuccess;
  uint32_t tried = 0;
  while (members) {
    const bool mine = members.mine();
    const uint32_t targets = mine ? targets_of(v, seat, opcode, t.line, tried) : 0;
    tried |= targets;
    const uint32_t left = move_targets_in_place(c, v, seat, here, targets, opcode, t);
    const uint32_t got = move_to(c, v, seat, here, left, opcode, t);
    if (mine) status = got;
    // On the direct route a command that has not come back may still write the frame.
    const bool lost = got == nvme::kTimedOut && v.path == nvme::kDirect;
    const bool again =
        mine && got != nvme::kSuccess && !lost && targets_of(v, seat, opcode, t.line, tried) != 0;
    members = here.ballot(again);
  }
  return status;
}

// As `move_lines_detached`.
FW_DEVICE_NOINLINE void move_detached_spread(line_cache& c, volume& v, lanes here, lanes members,
                                             uint8_t opcode, const transfer& t) {
  const bool mine = members.mine();
  const uint32_t seat = take_seat(here);
  const uint32_t targets = mine ? targets_of(v, seat, opcode, t.line, 0) : 0;
  if (mine && opcode == nvme::kWrite) begin_replicas(v, t.way);
  for (uint32_t n = 0; n < v.namespace_count; n++) {
    const lanes on = here.ballot(((targets >> n) & 1) != 0);
    if (on) move_detached_on(c, v, queue_on(v, seat, n), here, on, opcode, t);
  }
}

}  // namespace fw::cache
