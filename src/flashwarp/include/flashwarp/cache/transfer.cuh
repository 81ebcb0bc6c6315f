// Moving lines between frames and the namespace: fills and write-backs, waited for or detached.
//
// A waited-for transfer submits one command a lane, waits, moves the data of each lane with the
// whole warp, and frees the slots. A detached one returns at once; whoever drains its completion
// finishes it through `line_finisher`. Between taking a slot and freeing it a warp waits for
// completions only, never for lines, so slots always come free.
#pragma once

#include "flashwarp/cache/set_associative.cuh"
#include "flashwarp/nvme/prp.cuh"

namespace fw::cache {

// What one kernel did, kept in registers and added to the volume's counters once. Warp-uniform.
struct tally {
  uint32_t hits = 0;
  uint32_t misses = 0;
  uint32_t evictions = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_used = 0;

  // Adds what prefetches of the same launch did. A line fetched ahead is met once more, as a hit;
  // the access that it was fetched for was a miss all the same.
  FW_DEVICE void count_ahead(const tally& ahead) {
    hits -= ahead.misses < hits ? ahead.misses : hits;
    misses += ahead.misses;
    evictions += ahead.evictions;
    bytes_read += ahead.bytes_read;
  }

  FW_DEVICE void add(const tally& other) {
    hits += other.hits;
    misses += other.misses;
    evictions += other.evictions;
    bytes_read += other.bytes_read;
    bytes_used += other.bytes_used;
  }

  FW_DEVICE void add_to(const volume& v, uint32_t mask) {
    if (warp::lane() == base::lowest_bit(mask)) {
      counters& shard = shard_of(v);
      if (hits != 0) atomic::add_relaxed(&shard.hits, uint64_t(hits));
      if (misses != 0) atomic::add_relaxed(&shard.misses, uint64_t(misses));
      if (evictions != 0) atomic::add_relaxed(&shard.evictions, uint64_t(evictions));
      if (bytes_read != 0) atomic::add_relaxed(&shard.bytes_read, bytes_read);
      if (bytes_used != 0) atomic::add_relaxed(&shard.bytes_used, bytes_used);
    }
    *this = tally();
  }
};

// Finishes detached fills and write-backs for whoever drained their completions.
struct line_finisher {
  page_cache& cache;

  FW_DEVICE void finish(nvme::queue_pair& q, uint32_t mask, const nvme::detached_command& what,
                        uint32_t status) {
    uint64_t* word = reinterpret_cast<uint64_t*>(what.tag);
    const bool leads = warp::lane() == base::lowest_bit(mask);
    if (what.opcode == nvme::kRead) {
      if (status == nvme::kSuccess && q.data.path != nvme::kDirect) {
        // The tag went BUSY, which we have acquired with the slot, before our stores: a reader that
        // sees a new byte finds its tag changed.
        atomic::fence();
        warp::copy<warp::source::kStream>(mask, what.frame, what.source, what.bytes);
        warp::sync(mask);
      }
      // A failed prefetch leaves the line absent: the read that needs it will meet the error.
      if (leads) {
        const uint64_t busy = atomic::load_relaxed(word);
        atomic::store_release(
            word, status == nvme::kSuccess ? tag::filled(busy, false) : tag::emptied(busy));
      }
    } else if (leads) {
      const uint64_t line = tag::line_of(atomic::load_relaxed(word));
      if (status != nvme::kSuccess) record_error(volume_of(cache, line), status, what.opcode, line);
      end_write(word, status == nvme::kSuccess);
    }
  }
};

// One line's transfer, as a lane describes it.
struct transfer {
  uint64_t line;  // global line number
  uint64_t way;   // the frame
};

// One step of a wait for a line: helps this volume's queues and, every other time, those of the
// volumes that share the cache. The frame that we wait for may be in flight for one of them, on
// behalf of a kernel that has ended. `step` is the caller's own count.
FW_DEVICE_NOINLINE void help_any(page_cache& c, volume& v, uint32_t mask, uint32_t step) {
  line_finisher finisher{c};
  volume* target = &v;
  uint32_t queue = step >> 1;
  if ((step & 1) != 0) {
    // Each volume in turn; most entries of the table are free and cost one load.
    for (uint32_t i = 0; i < kVolumesMax; i++) {
      volume* candidate = &c.volumes[((step >> 1) + i) % kVolumesMax];
      if (candidate->line_count == 0) continue;
      target = candidate;
      break;
    }
    // A queue at random (Fibonacci hashing): in step with the volume, some would never be met.
    queue = (step * 0x9E3779B1u) >> 16;
  }
  nvme::help(target->queues[queue % target->queue_count], mask, finisher);
}

FW_DEVICE nvme::queue_pair& queue_of(const volume& v) {
  return v.queues[(warp::index() + base::spread_index()) % v.queue_count];
}

// Where the device finds (or leaves) the data of a command: the command's PRP1.
FW_DEVICE uint64_t data_address(const page_cache& c, const volume& v, const nvme::queue_pair& q,
                                uint32_t ticket, const transfer& t) {
  if (q.data.path == nvme::kMapped) {
    return q.data.mapped_base + ((t.line - v.line_begin) << c.shape.line_shift);
  }
  if (q.data.path == nvme::kBounce) return nvme::buffer_of(q, ticket);
  return reinterpret_cast<uint64_t>(frame_of(c.shape, t.way));
}

FW_DEVICE nvme::command line_command(const page_cache& c, const volume& v,
                                     const nvme::queue_pair& q, uint8_t opcode, uint32_t ticket,
                                     const transfer& t, uint64_t address) {
  const uint64_t lba = (t.line - v.line_begin) << (c.shape.line_shift - nvme::kLbaShift);
  const uint64_t bytes = bytes_of_line(c, v, t.line);
  const uint32_t blocks = uint32_t((bytes + nvme::kLbaBytes - 1) >> nvme::kLbaShift);
  const nvme::prp_pair prp = nvme::prp_entries(address, bytes, c.page_bytes, 0);
  return nvme::block_command(opcode, uint16_t(nvme::entry_of(q, ticket)), lba, blocks, prp.prp1,
                             prp.prp2);
}

// Copies frames to where write commands will find them. Call before the entries are written.
FW_DEVICE_NOINLINE void stage_writes(const page_cache& c, const volume& v,
                                     const nvme::queue_pair& q, uint32_t mask, uint32_t members,
                                     const transfer& t, uint64_t address) {
  if (q.data.path == nvme::kDirect) return;
  // Each lane has acquired its own line and slot; now all lanes read and write all of them.
  warp::sync(mask);
  const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(c.shape, t.way));
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

// Copies what read commands brought into the frames.
FW_DEVICE void land_reads(const page_cache& c, const volume& v, const nvme::queue_pair& q,
                          uint32_t mask, uint32_t members, const transfer& t, uint64_t address) {
  if (q.data.path != nvme::kDirect) {
    // Each lane has acquired its own completion; now all lanes read all of the data.
    warp::sync(mask);
    // The tags went BUSY before these stores: a reader that sees a new byte finds its tag changed.
    atomic::fence();
    const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(c.shape, t.way));
    const uint64_t bytes = bytes_of_line(c, v, t.line);
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
      const uint32_t source = base::lowest_bit(rest);
      warp::copy<warp::source::kStream>(mask, warp::broadcast(mask, frame, source),
                                        warp::broadcast(mask, address, source),
                                        warp::broadcast(mask, bytes, source));
    }
  }
  warp::sync(mask);
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
FW_DEVICE_NOINLINE bool submit_lines(page_cache& c, volume& v, nvme::queue_pair& q, uint32_t mask,
                                     uint32_t members, uint8_t opcode, const transfer& t,
                                     bool detached, uint32_t& ticket, uint64_t& address) {
  line_finisher finisher{c};
  const bool mine = (members >> warp::lane()) & 1;
  ticket = nvme::take_tickets(q, mask, members);
  if (!nvme::wait_for_slots(q, mask, members, ticket, finisher)) return false;
  address = mine ? data_address(c, v, q, ticket, t) : 0;
  if (opcode == nvme::kWrite) stage_writes(c, v, q, mask, members, t, address);
  if (mine) {
    if (detached) {
      const nvme::detached_command what = {reinterpret_cast<uint64_t>(&c.shape.tags[t.way]),
                                           reinterpret_cast<uint64_t>(frame_of(c.shape, t.way)),
                                           address, opcode, uint32_t(bytes_of_line(c, v, t.line))};
      atomic::store_plain(&q.detached[nvme::entry_of(q, ticket)], what);
    }
    nvme::write_entry(q, ticket, line_command(c, v, q, opcode, ticket, t, address),
                      detached ? nvme::slot::kDetached : 0);
  }
  warp::sync(mask);
  nvme::publish(q, mask);
  return true;
}

// Transfers one line for each lane of `members` and waits. Returns the lane's status field.
FW_DEVICE_NOINLINE uint32_t move_lines(page_cache& c, volume& v, uint32_t mask, uint32_t members,
                                       uint8_t opcode, const transfer& t) {
  nvme::queue_pair& q = queue_of(v);
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
      land_reads(c, v, q, mask, arrived, t, address);
    }
    // A slot whose command never came back stays taken: the drive may still write its buffer.
    if (mine && got != nvme::kTimedOut) nvme::release_slot(q, ticket);
  }
  return status;
}

// Starts one transfer for each lane of `members` that nobody will wait for.
FW_DEVICE_NOINLINE void move_lines_detached(page_cache& c, volume& v, uint32_t mask,
                                            uint32_t members, uint8_t opcode, const transfer& t) {
  nvme::queue_pair& q = queue_of(v);
  while (members != 0) {
    const uint32_t batch = first_batch(q, members);
    members &= ~batch;
    uint32_t ticket;
    uint64_t address;
    if (submit_lines(c, v, q, mask, batch, opcode, t, true, ticket, address)) continue;
    if (((batch >> warp::lane()) & 1) == 0) continue;
    if (opcode == nvme::kWrite) {
      end_write(&c.shape.tags[t.way], false);
      record_error(v, nvme::kTimedOut, opcode, t.line);
    } else {
      abandon_fill(c, t.way, atomic::load_relaxed(&c.shape.tags[t.way]));
    }
  }
}

}  // namespace fw::cache
