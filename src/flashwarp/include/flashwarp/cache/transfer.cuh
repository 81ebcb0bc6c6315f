// Moving lines between frames and the namespace: fills and write-backs, waited for or detached.
//
// A waited-for transfer submits one command a lane, waits, moves the data of each lane with the
// whole warp, and frees the slots. A detached one returns at once; whoever drains its completion
// finishes it through `line_finisher`. Between taking a slot and freeing it a warp waits for
// completions and, where a volume has several namespaces, for slots of later rings (spread.cuh):
// never for lines, so slots always come free.
#pragma once

#include "flashwarp/cache/spread.cuh"
#include "flashwarp/cache/visits.cuh"
#include "flashwarp/nvme/prp.cuh"

namespace fw::cache {

// What one kernel did, kept in registers and added to the volume's counters once. Warp-uniform.
struct tally {
  uint32_t hits = 0;
  uint32_t misses = 0;
  uint32_t evictions = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_used = 0;
  uint32_t tier_hits = 0;
  uint32_t tier_lines = 0;

  // Adds what prefetches of the same launch did. A line fetched ahead is met once more, as a hit;
  // the access that it was fetched for was a miss all the same.
  FW_DEVICE void count_ahead(const tally& ahead) {
    hits -= ahead.misses < hits ? ahead.misses : hits;
    misses += ahead.misses;
    evictions += ahead.evictions;
    bytes_read += ahead.bytes_read;
    tier_hits += ahead.tier_hits;
    tier_lines += ahead.tier_lines;
  }

  FW_DEVICE void add(const tally& other) {
    hits += other.hits;
    misses += other.misses;
    evictions += other.evictions;
    bytes_read += other.bytes_read;
    bytes_used += other.bytes_used;
    tier_hits += other.tier_hits;
    tier_lines += other.tier_lines;
  }

  FW_DEVICE void add_to(const volume& v, uint32_t mask) {
    if (warp::lane() == base::lowest_bit(mask)) {
      counters& shard = shard_of(v);
      if (hits != 0) atomic::add_relaxed(&shard.hits, uint64_t(hits));
      if (misses != 0) atomic::add_relaxed(&shard.misses, uint64_t(misses));
      if (evictions != 0) atomic::add_relaxed(&shard.evictions, uint64_t(evictions));
      if (bytes_read != 0) atomic::add_relaxed(&shard.bytes_read, bytes_read);
      if (bytes_used != 0) atomic::add_relaxed(&shard.bytes_used, bytes_used);
      if (tier_hits != 0) atomic::add_relaxed(&shard.tier_hits, uint64_t(tier_hits));
      if (tier_lines != 0) atomic::add_relaxed(&shard.tier_lines, uint64_t(tier_lines));
    }
    *this = tally();
  }

  // The same for what a kernel did through an array. Its hits are left out: those that no call met,
  // which are nearly all, are not counted either.
  FW_DEVICE void add_kernel_to(const volume& v, uint32_t mask) {
    hits = 0;
    if (warp::lane() == base::lowest_bit(mask)) {
      counters& shard = shard_of(v);
      if (misses != 0) atomic::add_relaxed(&shard.kernel_misses, uint64_t(misses));
      if (bytes_read != 0) atomic::add_relaxed(&shard.kernel_bytes_read, bytes_read);
    }
    add_to(v, mask);
  }
};

// All lanes' loads from a namespace in place, before any lane's second look at the path.
FW_DEVICE void finish_loads(uint32_t mask) {
  // Acquire, of whatever they have seen: see `nvme::is_current`.
  atomic::fence_system();
  warp::sync(mask);
}

// Finishes detached fills and write-backs for whoever drained their completions.
struct line_finisher {
  line_cache& cache;

  // Copies what the members' reads have brought into their frames. Returns the lane's status: of a
  // read whose data was left meanwhile (`nvme::is_current`), a failure.
  FW_DEVICE uint32_t land(nvme::queue_pair& q, uint32_t mask, uint32_t members,
                          const nvme::detached_command& what, uint32_t status) {
    if (nvme::path_of(q) == nvme::kDirect) return status;
    const bool read = what.opcode == nvme::kRead && status == nvme::kSuccess;
    uint32_t rest = members & warp::ballot(mask, read);
    if (rest == 0) return status;
    // The tags went BUSY, which we have acquired with the slots, before our stores: a reader that
    // sees a new byte finds its tag changed.
    atomic::fence();
    for (; rest != 0; rest &= rest - 1) {
      const uint32_t source = base::lowest_bit(rest);
      warp::copy<warp::source::kStream>(mask, warp::broadcast(mask, what.frame, source),
                                        warp::broadcast(mask, what.source, source),
                                        warp::broadcast(mask, uint64_t(what.bytes), source));
    }
    if (q.data.leased == 0) return status;
    finish_loads(mask);
    return read && !nvme::is_current(q, what.source) ? uint32_t(nvme::kCommandAborted) : status;
  }

  // Ends the life of one command; by one lane, which has synchronised with those that landed it.
  FW_DEVICE void end(const nvme::detached_command& what, uint32_t status) {
    uint64_t* word = reinterpret_cast<uint64_t*>(what.tag);
    if (what.opcode == nvme::kRead) {
      // A failed prefetch leaves the line absent: the read that needs it will meet the error.
      const uint64_t busy = atomic::load_relaxed(word);
      atomic::store_release(
          word, status == nvme::kSuccess ? tag::filled(busy, false) : tag::emptied(busy));
      return;
    }
    // The last replica's completion ends the write-back, for better or worse.
    uint32_t* count = reinterpret_cast<uint32_t*>(what.source);
    if (count != nullptr && !finish_replica(count, status)) return;
    const uint64_t line = tag::line_of(atomic::load_relaxed(word));
    if (status != nvme::kSuccess) record_error(volume_of(cache, line), status, what.opcode, line);
    end_write(word, status == nvme::kSuccess);
  }
};

// One line's transfer, as a lane describes it.
struct transfer {
  uint64_t line;  // global line number
  uint64_t way;   // the frame
};

// The volume that helps at `step` of a wait: our own, and every fourth time each in turn.
FW_DEVICE volume& volume_to_help(line_cache& c, volume& v, uint32_t step) {
  if ((step & 3) != 3) return v;
  const uint32_t end = atomic::load_relaxed(&c.volume_end);
  for (uint32_t i = 0; i < end; i++) {
    volume& candidate = c.volumes[((step >> 2) + warp::index() + i) % end];
    if (atomic::load_acquire(&candidate.attached) != 0) return candidate;
  }
  return v;
}

// Its queue pair: every other time one to which this warp submits, where what it waits for most
// likely is; else those of the volume in turn.
FW_DEVICE nvme::queue_pair& queue_to_help(const volume& v, uint32_t step) {
  const uint32_t turn = step >> 1;
  if ((step & 1) == 0) {
    const uint32_t seat = warp::index() + base::spread_index();
    return v.spread == kOneNamespace ? queue_of(v, seat)
                                     : queue_on(v, seat, turn % v.namespace_count);
  }
  // A queue at random (Fibonacci hashing): in step with the volume, some would never be met.
  const uint32_t random = ((warp::index() + step) * 0x9E3779B1u) >> 16;
  return v.queues[((turn & 1) != 0 ? random : warp::index() + (turn >> 1)) % v.queue_count];
}

// One step of a wait for a line, of which `step` counts the steps. The frame that we wait for may
// be in flight for another volume on the cache, on behalf of a kernel that has ended.
FW_DEVICE_NOINLINE void help_any(line_cache& c, volume& v, uint32_t mask, uint32_t step) {
  line_finisher finisher{c};
  const uint32_t leader = base::lowest_bit(mask);
  // One lane chooses for all: they may read different numbers, and have waited for other times.
  volume* visited = nullptr;
  uint64_t queue = 0;
  if (warp::lane() == leader) {
    volume& target = volume_to_help(c, v, step);
    const bool ours = same_array(target, v);
    if (ours || begin_visit(target)) {
      if (!ours) visited = &target;
      queue = reinterpret_cast<uint64_t>(&queue_to_help(target, step));
    }
  }
  queue = warp::broadcast(mask, queue, leader);
  if (queue == 0) {
    // A neighbour that has just closed: nothing of it is in flight any more.
    base::pause(nvme::kBackOffNs);
    return;
  }
  nvme::help(*reinterpret_cast<nvme::queue_pair*>(queue), mask, finisher);
  // All lanes have left the queue before the one that says so.
  warp::sync(mask);
  if (visited != nullptr) end_visit(*visited);
}

// Where the device finds (or leaves) the data of a command on `path`: the command's PRP1.
FW_DEVICE uint64_t data_address(const line_cache& c, const volume& v, const nvme::queue_pair& q,
                                uint32_t path, uint32_t ticket, const transfer& t) {
  if (path == nvme::kInPlace) {
    return q.data.mapped_base + (line_in_namespace(v, t.line) << c.geometry.line_shift);
  }
  if (path == nvme::kBounce) return nvme::buffer_of(q, ticket);
  return reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way));
}

FW_DEVICE nvme::command line_command(const line_cache& c, const volume& v,
                                     const nvme::queue_pair& q, uint8_t opcode, uint32_t ticket,
                                     const transfer& t, uint64_t address) {
  const uint64_t lba = line_in_namespace(v, t.line) << (c.geometry.line_shift - nvme::kLbaShift);
  const uint64_t bytes = bytes_of_line(c, v, t.line);
  const uint32_t blocks = uint32_t((bytes + nvme::kLbaBytes - 1) >> nvme::kLbaShift);
  const nvme::prp_pair prp = nvme::prp_entries(address, bytes, c.page_bytes, 0);
  return nvme::block_command(opcode, uint16_t(nvme::entry_of(q, ticket)), lba, blocks, prp.prp1,
                             prp.prp2);
}

// Copies frames to where write commands will find them. Call before the entries are written.
FW_DEVICE_NOINLINE void stage_writes(const line_cache& c, const volume& v,
                                     const nvme::queue_pair& q, uint32_t mask, uint32_t members,
                                     const transfer& t, uint64_t address) {
  if (nvme::path_of(q) == nvme::kDirect) return;
  // Each lane has acquired its own line and slot; now all lanes read and write all of them.
  warp::sync(mask);
  const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way));
  const uint64_t bytes = bytes_of_line(c, v, t.line);
  for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
    const uint32_t source = base::lowest_bit(rest);
    warp::copy<warp::source::kFrame>(mask, warp::broadcast(mask, address, source),
                                     warp::broadcast(mask, frame, source),
                                     warp::broadcast(mask, bytes, source));
  }
  // The other lanes' copies before each lane's entry.
  warp::sync(mask);
  atomic::fence_system();
}

// Copies what read commands brought into the frames: those of `members`, of all that `ended`.
// Returns the lanes of `ended` that must read again, since the host left their path meanwhile.
FW_DEVICE uint32_t land_reads(const line_cache& c, const volume& v, const nvme::queue_pair& q,
                              uint32_t mask, uint32_t ended, uint32_t members, const transfer& t,
                              uint64_t address) {
  if (nvme::path_of(q) != nvme::kDirect) {
    // Each lane has acquired its own completion; now all lanes read all of the data.
    warp::sync(mask);
    // The tags went BUSY before these stores: a reader that sees a new byte finds its tag changed.
    atomic::fence();
    const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way));
    const uint64_t bytes = bytes_of_line(c, v, t.line);
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
      const uint32_t source = base::lowest_bit(rest);
      warp::copy<warp::source::kStream>(mask, warp::broadcast(mask, frame, source),
                                        warp::broadcast(mask, address, source),
                                        warp::broadcast(mask, bytes, source));
    }
  }
  if (q.data.leased == 0) {
    warp::sync(mask);
    return 0;
  }
  finish_loads(mask);
  // One that failed reads again, too: the file may have been cut before the path was left.
  const bool ours = (ended >> warp::lane()) & 1;
  return warp::ballot(mask, ours && !nvme::is_current(q, address));
}

// The lowest lanes of `members`, no more than the ring has slots.
FW_DEVICE uint32_t first_batch(const nvme::queue_pair& q, uint32_t members) {
  uint32_t batch = 0;
  for (uint32_t n = 0; members != 0 && n < (1u << q.depth_log2); n++) {
    batch |= members & (~members + 1);
    members &= members - 1;
  }
  return batch;
}

// Submits one command for each lane of `members` (no more than the ring's depth). False when the
// slots did not come free in time.
FW_DEVICE_NOINLINE bool submit_lines(line_cache& c, volume& v, nvme::queue_pair& q, uint32_t mask,
                                     uint32_t members, uint8_t opcode, const transfer& t,
                                     bool detached, uint32_t& ticket, uint64_t& address) {
  line_finisher finisher{c};
  const bool mine = (members >> warp::lane()) & 1;
  ticket = nvme::take_tickets(q, mask, members);
  if (!nvme::wait_for_slots(q, mask, members, ticket, finisher)) return false;
  address = mine ? data_address(c, v, q, nvme::path_of(q), ticket, t) : 0;
  if (opcode == nvme::kWrite) stage_writes(c, v, q, mask, members, t, address);
  if (mine) {
    if (detached) {
      const nvme::detached_command what = {
          reinterpret_cast<uint64_t>(&c.geometry.tags[t.way]),
          reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way)),
          opcode == nvme::kWrite ? replica_count(v, t.way) : address, opcode,
          uint32_t(bytes_of_line(c, v, t.line))};
      atomic::store_plain(&q.detached[nvme::entry_of(q, ticket)], what);
    }
    nvme::write_entry(q, ticket, line_command(c, v, q, opcode, ticket, t, address),
                      detached ? nvme::slot::kDetached : 0);
  }
  warp::sync(mask);
  nvme::publish(q, mask);
  return true;
}

// What a lane has in flight: the namespaces, as bits; those where it reads in place under a lease;
// and its ticket on each. The seat, which is the same for all lanes, says in which rings.
struct flights {
  uint32_t seat;
  uint32_t on;
  uint32_t leased;
  uint32_t tickets[kNamespacesMax];
};

// Submits each lane's commands to the namespaces of `targets`, to each no more than its ring has
// slots, and takes what it submitted out of `targets`. In the order of the rings: see spread.cuh.
// Returns the status of commands for which no slot came free.
FW_DEVICE_NOINLINE uint32_t submit_spread(line_cache& c, volume& v, uint32_t mask,
                                          uint32_t& targets, uint8_t opcode, const transfer& t,
                                          flights& f) {
  uint32_t status = nvme::kSuccess;
  f.on = 0;
  f.leased = 0;
  for (uint32_t n = 0; n < v.namespace_count; n++) {
    const uint32_t members = warp::ballot(mask, ((targets >> n) & 1) != 0);
    if (members == 0) continue;
    nvme::queue_pair& q = queue_on(v, f.seat, n);
    const uint32_t batch = first_batch(q, members);
    const bool mine = (batch >> warp::lane()) & 1;
    if (mine) targets &= ~(1u << n);
    uint32_t ticket;
    uint64_t address;
    const bool sent = submit_lines(c, v, q, mask, batch, opcode, t, false, ticket, address);
    f.tickets[n] = ticket;
    if (mine && sent) f.on |= 1u << n;
    if (mine && sent && q.data.leased != 0 && address != nvme::buffer_of(q, ticket)) {
      f.leased |= 1u << n;
    }
    if (mine && !sent) status = nvme::kTimedOut;
  }
  return status;
}

// Which of the lane's commands in flight are done, as bits. Each lane looks at its own slots, all
// lanes at a time.
FW_DEVICE uint32_t done_flights(const volume& v, const flights& f) {
  uint32_t done = 0;
  for (uint32_t rest = f.on; rest != 0; rest &= rest - 1) {
    const uint32_t n = base::lowest_bit(rest);
    const nvme::queue_pair& q = queue_on(v, f.seat, n);
    // Acquire: pairs with the drainer's release, behind which the controller's data lies.
    const uint64_t word = atomic::load_acquire(&q.slots[nvme::entry_of(q, f.tickets[n])]);
    if (nvme::slot::phase_of(word) == nvme::slot::kDone) done |= 1u << n;
  }
  return done;
}

// Ends the commands of `batch` on one namespace, all done or given up: lands what reads brought,
// frees the slots. Returns the lane's status field; `again` tells whether it must read once more.
FW_DEVICE_NOINLINE uint32_t end_flight(line_cache& c, volume& v, nvme::queue_pair& q, uint32_t mask,
                                       uint32_t batch, uint8_t opcode, const transfer& t,
                                       uint32_t ticket, bool leased, bool done, bool& again) {
  const bool mine = (batch >> warp::lane()) & 1;
  uint32_t status = nvme::kSuccess;
  if (mine) {
    const uint64_t word = atomic::load_relaxed(&q.slots[nvme::entry_of(q, ticket)]);
    status = done ? nvme::slot::status_of(word) : nvme::kTimedOut;
  }
  again = false;
  if (opcode == nvme::kRead) {
    const uint32_t arrived = warp::ballot(mask, mine && status == nvme::kSuccess);
    const uint32_t ended = warp::ballot(mask, mine && status != nvme::kTimedOut);
    const uint32_t path = leased ? uint32_t(nvme::kInPlace) : nvme::path_of(q);
    const uint64_t address = mine ? data_address(c, v, q, path, ticket, t) : 0;
    const uint32_t outdated = land_reads(c, v, q, mask, ended, arrived, t, address);
    again = (outdated >> warp::lane()) & 1;
  }
  // A slot whose command never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
  return status;
}

// Waits for what is in flight, on all namespaces at a time. Each ring's slots are freed as soon as
// its own commands are done, whatever the others do: another warp may wait for them with slots of
// theirs. Puts namespaces that must be asked once more into `targets`.
FW_DEVICE_NOINLINE uint32_t wait_for_flights(line_cache& c, volume& v, uint32_t mask,
                                             uint32_t& targets, uint8_t opcode, const transfer& t,
                                             flights& f) {
  line_finisher finisher{c};
  nvme::deadline limit(v.queues[0].data);
  uint32_t status = nvme::kSuccess;
  while (warp::any(mask, f.on != 0)) {
    const uint32_t done = done_flights(v, f);
    const bool late = warp::any(mask, limit.passed());
    bool moved = false;
    for (uint32_t n = 0; n < v.namespace_count; n++) {
      const bool mine = (f.on >> n) & 1;
      const uint32_t batch = warp::ballot(mask, mine);
      if (batch == 0) continue;
      nvme::queue_pair& q = queue_on(v, f.seat, n);
      if (warp::any(mask, mine && ((done >> n) & 1) == 0)) {
        const bool dead = warp::any(mask, late || atomic::load_relaxed(&q.failed) != 0);
        if (!dead) {
          moved = nvme::drain(q, mask, finisher) != 0 || moved;
          continue;
        }
        atomic::store_relaxed(&q.failed, 1u);
      }
      bool again;
      const uint32_t got = end_flight(c, v, q, mask, batch, opcode, t, f.tickets[n],
                                      ((f.leased >> n) & 1) != 0, ((done >> n) & 1) != 0, again);
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

// One command for each namespace in the lane's `targets`: submitted to all before any is waited
// for. Returns the worst status of the lane's commands.
FW_DEVICE uint32_t move_to(line_cache& c, volume& v, uint32_t seat, uint32_t mask, uint32_t targets,
                           uint8_t opcode, const transfer& t) {
  uint32_t status = nvme::kSuccess;
  while (warp::any(mask, targets != 0)) {
    flights f;
    f.seat = seat;
    status = worse_of(status, submit_spread(c, v, mask, targets, opcode, t, f));
    status = worse_of(status, wait_for_flights(c, v, mask, targets, opcode, t, f));
  }
  return status;
}

// `move_lines` for a volume of several namespaces. A read that fails on one replica asks the next.
FW_DEVICE_NOINLINE uint32_t move_lines_spread(line_cache& c, volume& v, uint32_t mask,
                                              uint32_t members, uint8_t opcode, const transfer& t) {
  const uint32_t seat = take_seat(mask);
  uint32_t status = nvme::kSuccess;
  uint32_t tried = 0;
  while (members != 0) {
    const bool mine = (members >> warp::lane()) & 1;
    const uint32_t targets = mine ? targets_of(v, seat, opcode, t.line, tried) : 0;
    const uint32_t got = move_to(c, v, seat, mask, targets, opcode, t);
    if (mine) status = got;
    tried |= targets;
    // On the direct path a command that has not come back may still write the frame.
    const bool lost = got == nvme::kTimedOut && v.path == nvme::kDirect;
    const bool again =
        mine && got != nvme::kSuccess && !lost && targets_of(v, seat, opcode, t.line, tried) != 0;
    members = warp::ballot(mask, again);
  }
  return status;
}

// Transfers one line for each lane of `members` and waits. Returns the lane's status field.
FW_DEVICE_NOINLINE uint32_t move_lines(line_cache& c, volume& v, uint32_t mask, uint32_t members,
                                       uint8_t opcode, const transfer& t) {
  if (v.spread != kOneNamespace) return move_lines_spread(c, v, mask, members, opcode, t);
  nvme::queue_pair& q = queue_of(v, take_seat(mask));
  line_finisher finisher{c};
  uint32_t status = 0;
  while (members != 0) {
    const uint32_t batch = first_batch(q, members);
    const bool mine = (batch >> warp::lane()) & 1;
    members &= ~batch;
    uint32_t ticket;
    uint64_t address;
    if (!submit_lines(c, v, q, mask, batch, opcode, t, false, ticket, address)) {
      if (mine) status = nvme::kTimedOut;
      continue;
    }
    const uint32_t got = nvme::wait_for_completions(q, mask, batch, ticket, finisher);
    if (mine) status = got;
    if (opcode == nvme::kRead) {
      const uint32_t arrived = warp::ballot(mask, mine && got == nvme::kSuccess);
      const uint32_t ended = warp::ballot(mask, mine && got != nvme::kTimedOut);
      members |= land_reads(c, v, q, mask, ended, arrived, t, address);
    }
    // A slot whose command never came back stays taken: the drive may still write its buffer.
    if (mine && got != nvme::kTimedOut) nvme::release_slot(q, ticket);
  }
  return status;
}

// Ends a detached transfer for which no slot came free. The queue pair is dead then, which nobody
// else may ever notice: so a prefetch says it too, unless another replica can answer in its place.
FW_DEVICE void give_up_detached(line_cache& c, volume& v, uint8_t opcode, const transfer& t) {
  if (opcode == nvme::kWrite || v.spread != kReplicated) {
    record_error(v, nvme::kTimedOut, opcode, t.line);
  }
  if (opcode != nvme::kWrite) {
    abandon_fill(c, t.way, atomic::load_relaxed(&c.geometry.tags[t.way]));
    return;
  }
  uint32_t status = nvme::kTimedOut;
  uint32_t* count = reinterpret_cast<uint32_t*>(replica_count(v, t.way));
  if (count == nullptr || finish_replica(count, status)) end_write(&c.geometry.tags[t.way], false);
}

FW_DEVICE void move_detached_on(line_cache& c, volume& v, nvme::queue_pair& q, uint32_t mask,
                                uint32_t members, uint8_t opcode, const transfer& t) {
  while (members != 0) {
    const uint32_t batch = first_batch(q, members);
    members &= ~batch;
    uint32_t ticket;
    uint64_t address;
    if (submit_lines(c, v, q, mask, batch, opcode, t, true, ticket, address)) continue;
    if ((batch >> warp::lane()) & 1) give_up_detached(c, v, opcode, t);
  }
}

FW_DEVICE_NOINLINE void move_detached_spread(line_cache& c, volume& v, uint32_t mask,
                                             uint32_t members, uint8_t opcode, const transfer& t) {
  const bool mine = (members >> warp::lane()) & 1;
  const uint32_t seat = take_seat(mask);
  const uint32_t targets = mine ? targets_of(v, seat, opcode, t.line, 0) : 0;
  if (mine && opcode == nvme::kWrite) begin_replicas(v, t.way);
  for (uint32_t n = 0; n < v.namespace_count; n++) {
    const uint32_t on = warp::ballot(mask, ((targets >> n) & 1) != 0);
    if (on != 0) move_detached_on(c, v, queue_on(v, seat, n), mask, on, opcode, t);
  }
}

// Starts one transfer for each lane of `members` that nobody will wait for.
FW_DEVICE_NOINLINE void move_lines_detached(line_cache& c, volume& v, uint32_t mask,
                                            uint32_t members, uint8_t opcode, const transfer& t) {
  if (v.spread != kOneNamespace) return move_detached_spread(c, v, mask, members, opcode, t);
  move_detached_on(c, v, queue_of(v, take_seat(mask)), mask, members, opcode, t);
}

}  // namespace fw::cache
