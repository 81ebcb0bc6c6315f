// Dirty lines on their way to the namespace: cleaning ahead of fills, flush, and giving lines up.
//
// A line enters with its tag WRITING (begin_write) and leaves clean, or dirty again with the error
// recorded. It stays readable and writable in between.
#pragma once

#include "flashwarp/cache/transfer.cuh"

namespace fw::cache {

// Gives up a line, taken for write-back, of an array that is gone. Its close has failed: it waits
// for lines in write-back, and has told what it could not write.
FW_DEVICE void give_up_line(line_cache& c, const transfer& t) {
  update(
      &c.geometry.tags[t.way],
      [&](uint64_t w) { return tag::holds(w, t.line) && (w & tag::kWriting) != 0; },
      [](uint64_t w) { return tag::emptied(w); });
}

// What becomes of a line whose write-back was waited for. Returns its status.
FW_DEVICE uint32_t end_write_back(line_cache& c, volume& v, const transfer& t, uint32_t status) {
  if (status != nvme::kSuccess) record_error(v, status, nvme::kWrite, t.line);
  // A command that has not come back may still read the frame, and write these blocks after a
  // newer one: the line stays WRITING, so that neither is given away.
  if (status != nvme::kTimedOut) {
    end_write(&c.geometry.tags[t.way], status == nvme::kSuccess);
  } else if (v.spread == kReplicated) {
    atomic::store_relaxed(&v.failed, 1u);
  }
  return status;
}

// Writes back the line of each lane in `members`, volume by volume: a victim may belong to another
// array than `self` on the same cache. Detached, or waited for. Returns the lane's status.
FW_DEVICE_NOINLINE uint32_t write_back(line_cache& c, const volume& self, uint32_t mask,
                                       uint32_t members, const transfer& t, bool detached) {
  uint32_t status = 0;
  const bool mine = (members >> warp::lane()) & 1;
  volume* owner = mine ? &volume_of(c, t.line) : nullptr;
  while (members != 0) {
    const uint32_t leader = base::lowest_bit(members);
    volume* v =
        reinterpret_cast<volume*>(warp::broadcast(mask, reinterpret_cast<uint64_t>(owner), leader));
    const uint32_t batch = members & warp::ballot(mask, mine && owner == v);
    members &= ~batch;
    const bool in_batch = (batch >> warp::lane()) & 1;
    const bool visits = !same_array(*v, self);
    if (visits && !begin_visit(*v, mask)) {
      if (in_batch) give_up_line(c, t);
      continue;
    }
    if (in_batch) {
      counters& shard = shard_of(*v);
      atomic::add_relaxed(&shard.write_backs, uint64_t(1));
      atomic::add_relaxed(&shard.bytes_written, bytes_of_line(c, *v, t.line));
    }
    if (detached) {
      move_lines_detached(c, *v, mask, batch, nvme::kWrite, t);
    } else {
      const uint32_t got = move_lines(c, *v, mask, batch, nvme::kWrite, t);
      if (in_batch) status = end_write_back(c, *v, t, got);
    }
    if (visits) end_visit(*v, mask);
  }
  return status;
}

// Whether a command of the volume ran out of time: what it holds will not come free.
FW_DEVICE bool has_failed(volume& v) { return atomic::load_relaxed(&failure_mark(v)) != 0; }

// Writes back one way a lane if it holds a dirty line of [line_begin, line_end), and waits until no
// write of such a line, ours or another's, is in flight. Failures are recorded and end the wait.
FW_DEVICE void flush_ways(line_cache& c, volume& v, uint32_t mask, bool wants, uint64_t way,
                          uint64_t line_begin, uint64_t line_end) {
  nvme::deadline limit(v.queues[0].data);
  uint32_t step = 0;
  bool pending = wants;
  while (warp::any(mask, pending)) {
    const uint64_t word = pending ? atomic::load_acquire(&c.geometry.tags[way]) : 0;
    const uint64_t line = tag::line_of(word);
    const bool ours = tag::state_of(word) == tag::kValid && line >= line_begin && line < line_end;
    const bool in_flight = ours && (word & tag::kWriting) != 0;
    const bool dirty = ours && !in_flight && (word & tag::kDirty) != 0;
    const bool taken = dirty && begin_write(&c.geometry.tags[way], line);
    const uint32_t members = warp::ballot(mask, taken);
    if (members != 0) write_back(c, v, mask, members, {line, way}, false);
    // A line that changed under us (dirty, not taken) is looked at again.
    pending = pending && (in_flight || (dirty && !taken));
    if (!warp::any(mask, pending) || members != 0) continue;
    if (warp::any(mask, limit.passed() || has_failed(v))) {
      if (pending) record_error(v, nvme::kTimedOut, nvme::kWrite, line);
      return;
    }
    help_any(c, v, mask, step++);
  }
}

// Empties one way a lane if it holds a line of the volume: waits for fills and pins, drops the
// rest. Dirty lines are kept unless `drop_dirty`: after a flush they are what others have stored
// meanwhile, which is neither lost nor an error.
FW_DEVICE void invalidate_ways(line_cache& c, volume& v, uint32_t mask, bool wants, uint64_t way,
                               bool drop_dirty) {
  nvme::deadline limit(v.queues[0].data);
  uint32_t step = 0;
  bool pending = wants;
  while (warp::any(mask, pending)) {
    const uint64_t word = pending ? atomic::load_acquire(&c.geometry.tags[way]) : 0;
    const uint64_t line = tag::line_of(word);
    if (pending && (tag::state_of(word) == tag::kInvalid || line < v.line_begin ||
                    line - v.line_begin >= v.line_count)) {
      pending = false;
    }
    const bool unmovable =
        tag::state_of(word) == tag::kBusy || (word & (tag::kPinMask | tag::kWriting)) != 0;
    if (pending && !unmovable) {
      if ((word & tag::kDirty) != 0 && !drop_dirty) {
        pending = false;
      } else if (atomic::cas_acq_rel(&c.geometry.tags[way], word, tag::emptied(word))) {
        pending = false;
      }
    }
    if (!warp::any(mask, pending)) return;
    if (warp::any(mask, limit.passed() || has_failed(v))) {
      if (pending) record_error(v, nvme::kTimedOut, nvme::kRead, line);
      return;
    }
    help_any(c, v, mask, step++);
  }
}

// Drops one line a lane of the volume from the host tier, after its frames have been emptied. One
// that is being copied is waited for: its copier waits for nothing, and then it is in the tier, or
// in a frame that is not ours.
FW_DEVICE void drop_from_tier(line_cache& c, volume& v, uint32_t mask, bool wants, uint64_t place) {
  nvme::deadline limit(v.queues[0].data);
  bool pending = wants;
  while (warp::any(mask, pending)) {
    const uint64_t word = pending ? atomic::load_acquire(&c.tier.tags[place]) : 0;
    const bool ours =
        tier::state_of(word) != tier::kEmpty && tier::line_of(word) - v.line_begin < v.line_count;
    const bool held = tier::state_of(word) == tier::kHeld;
    // A holder of the set's lock who takes the place meanwhile stores over what we do.
    if (!ours || (held && atomic::cas_acq_rel(&c.tier.tags[place], word, uint64_t(tier::kEmpty)))) {
      pending = false;
    }
    if (!warp::any(mask, pending)) return;
    if (warp::any(mask, limit.passed() || has_failed(v))) {
      if (pending) record_error(v, nvme::kTimedOut, nvme::kRead, tier::line_of(word));
      return;
    }
    base::pause(nvme::kBackOffNs);
  }
}

// The same for a volume whose controller is gone; see forget_way.
FW_DEVICE void forget_in_tier(line_cache& c, const volume& v, uint64_t place) {
  const uint64_t word = atomic::load_acquire(&c.tier.tags[place]);
  const bool ours =
      tier::state_of(word) != tier::kEmpty && tier::line_of(word) - v.line_begin < v.line_count;
  if (ours) atomic::store_release(&c.tier.tags[place], uint64_t(tier::kEmpty));
}

// Empties one way a lane if it holds a line of the volume, whatever its state. For a volume whose
// controller is gone, so that nothing can come back any more; touches neither queues nor records.
FW_DEVICE void forget_way(line_cache& c, const volume& v, uint64_t way) {
  // A neighbour's kernel may claim the frame meanwhile; what it made of the tag must not be undone.
  update(
      &c.geometry.tags[way],
      [&](uint64_t w) {
        return tag::state_of(w) != tag::kInvalid && tag::line_of(w) - v.line_begin < v.line_count;
      },
      [](uint64_t w) { return tag::emptied(w); });
}

}  // namespace fw::cache
