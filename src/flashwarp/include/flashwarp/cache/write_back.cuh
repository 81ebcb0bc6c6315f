// Writes dirty lines to the namespace, ahead of fills or for a flush; empties frames.
//
// `begin_write` makes a line WRITING before its write-back begins. Afterwards the line is clean or,
// if the write failed, dirty again with the error recorded. It stays readable and writable all the
// time.
#pragma once

#include "flashwarp/cache/transfer.cuh"
#include "flashwarp/cache/visits.cuh"

namespace fw::cache {

// Empties a WRITING line of an array that is gone. No store is lost in silence: `close` waits for
// lines in write-back, so it has failed and has reported what it could not write.
FW_DEVICE void give_up_line(line_cache& c, const transfer& t) {
  update(
      &c.geometry.tags[t.way],
      [&](uint64_t w) { return tag::holds(w, t.line) && (w & tag::kWriting) != 0; },
      [](uint64_t w) { return tag::emptied(w); });
}

// Ends a write-back that was waited for. Returns its status.
FW_DEVICE uint32_t end_write_back(line_cache& c, volume& v, const transfer& t, uint32_t status) {
  if (status != nvme::kSuccess) record_error(v, status, nvme::kWrite, t.line);
  // A command that has not come back may still read the frame, and may write the line's blocks
  // after a newer command has: the line stays WRITING, so that it keeps its frame.
  if (status != nvme::kTimedOut) {
    end_write(&c.geometry.tags[t.way], status == nvme::kSuccess);
  } else if (v.spread == kReplicated) {
    atomic::store_relaxed(&v.failed, 1u);
  }
  return status;
}

FW_DEVICE void count_write(line_cache& c, const volume& v, const transfer& t) {
  counters& shard = shard_of(v);
  atomic::add_relaxed(&shard.write_backs, uint64_t(1));
  atomic::add_relaxed(&shard.bytes_written, bytes_of_line(c, v, t.line));
}

// Writes back the line of each lane in `members`, volume by volume, because a victim may belong to
// another array than `self`. Waits for the writes unless `detached`. Returns the lane's status.
FW_DEVICE_NOINLINE uint32_t write_back(line_cache& c, const volume& self, lanes here, lanes members,
                                       const transfer& t, bool detached) {
  uint32_t status = 0;
  const bool mine = members.mine();
  volume* owner = mine ? &volume_of(c, t.line) : nullptr;
  while (members) {
    const uint32_t leader = members.leader();
    volume* v =
        reinterpret_cast<volume*>(here.broadcast(reinterpret_cast<uint64_t>(owner), leader));
    const lanes bundle = members & here.ballot(mine && owner == v);
    members -= bundle;
    const bool in_bundle = bundle.mine();
    const bool visits = !same_array(*v, self);
    if (visits && !begin_visit(*v, here)) {
      if (in_bundle) give_up_line(c, t);
      continue;
    }
    if (in_bundle) count_write(c, *v, t);
    if (detached) {
      move_lines_detached(c, *v, here, bundle, nvme::kWrite, t);
    } else {
      const uint32_t got = move_lines(c, *v, here, bundle, nvme::kWrite, t);
      if (in_bundle) status = end_write_back(c, *v, t, got);
    }
    if (visits) end_visit(*v, here);
  }
  return status;
}

// Whether a command of the volume ran out of time. Lines and slots that it holds stay taken.
FW_DEVICE bool has_failed(volume& v) { return atomic::load_relaxed(&failure_mark(v)) != 0; }

// Writes back each lane's way if it holds a dirty line of [line_begin, line_end). Waits until no
// write-back of such a line is in flight, whichever warp began it. Records failures, which end the
// wait.
FW_DEVICE void flush_ways(line_cache& c, volume& v, lanes here, bool wants, uint64_t way,
                          uint64_t line_begin, uint64_t line_end) {
  nvme::deadline limit(v.queues[0].data);
  uint32_t step = 0;
  bool pending = wants;
  while (here.any(pending)) {
    const uint64_t word = pending ? atomic::load_acquire(&c.geometry.tags[way]) : 0;
    const uint64_t line = tag::line_of(word);
    const bool ours = tag::state_of(word) == tag::kValid && line >= line_begin && line < line_end;
    const bool in_flight = ours && (word & tag::kWriting) != 0;
    const bool dirty = ours && !in_flight && (word & tag::kDirty) != 0;
    const bool taken = dirty && begin_write(&c.geometry.tags[way], line);
    const lanes members = here.ballot(taken);
    if (members) write_back(c, v, here, members, {line, way}, false);
    // A dirty line that was not taken has just changed: look at it again.
    pending = pending && (in_flight || (dirty && !taken));
    if (!here.any(pending) || members) continue;
    if (here.any(limit.passed() || has_failed(v))) {
      if (pending) record_error(v, nvme::kTimedOut, nvme::kWrite, line);
      return;
    }
    help_any(c, v, here, step++);
  }
}

// Empties each lane's way if it holds a line of the volume, after its fill, pins and write-back
// have ended. Keeps a dirty line unless `drop_dirty`: after a flush, it holds what other kernels
// have stored since. Returns false if the wait of any lane ran out of time, which it records.
FW_DEVICE bool invalidate_ways(line_cache& c, volume& v, lanes here, bool wants, uint64_t way,
                               bool drop_dirty) {
  nvme::deadline limit(v.queues[0].data);
  uint32_t step = 0;
  bool pending = wants;
  while (here.any(pending)) {
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
    if (!here.any(pending)) break;
    if (here.any(limit.passed() || has_failed(v))) {
      if (pending) record_error(v, nvme::kTimedOut, nvme::kRead, line);
      return false;
    }
    help_any(c, v, here, step++);
  }
  return true;
}

// Empties each lane's place in the host tier if it holds a line of the volume. The volume's frames
// are empty already. Waits while a warp copies the line, which is brief: that warp waits for
// nothing.
FW_DEVICE void drop_from_tier(line_cache& c, volume& v, lanes here, bool wants, uint64_t place) {
  nvme::deadline limit(v.queues[0].data);
  bool pending = wants;
  while (here.any(pending)) {
    const uint64_t word = pending ? atomic::load_acquire(&c.tier.tags[place]) : 0;
    const bool ours =
        tier::state_of(word) != tier::kEmpty && tier::line_of(word) - v.line_begin < v.line_count;
    const bool held = tier::state_of(word) == tier::kHeld;
    // A warp with the set's lock may take the place meanwhile: it then stores over our change.
    if (!ours || (held && atomic::cas_acq_rel(&c.tier.tags[place], word, uint64_t(tier::kEmpty)))) {
      pending = false;
    }
    if (!here.any(pending)) return;
    if (here.any(limit.passed() || has_failed(v))) {
      if (pending) record_error(v, nvme::kTimedOut, nvme::kRead, tier::line_of(word));
      return;
    }
    base::pause(nvme::kBackOffNs);
  }
}

// As `drop_from_tier`, for a volume whose controller has stopped; see `forget_way`.
FW_DEVICE void forget_in_tier(line_cache& c, const volume& v, uint64_t place) {
  const uint64_t word = atomic::load_acquire(&c.tier.tags[place]);
  const bool ours =
      tier::state_of(word) != tier::kEmpty && tier::line_of(word) - v.line_begin < v.line_count;
  if (ours) atomic::store_release(&c.tier.tags[place], uint64_t(tier::kEmpty));
}

// Empties a way if it holds a line of the volume, whatever its state. For a volume whose controller
// has stopped, so that no command can come back. Uses neither queues nor records.
FW_DEVICE void forget_way(line_cache& c, const volume& v, uint64_t way) {
  // Another array's kernel may claim the frame meanwhile; its change of the tag must stay.
  update(
      &c.geometry.tags[way],
      [&](uint64_t w) {
        return tag::state_of(w) != tag::kInvalid && tag::line_of(w) - v.line_begin < v.line_count;
      },
      [](uint64_t w) { return tag::emptied(w); });
}

}  // namespace fw::cache
