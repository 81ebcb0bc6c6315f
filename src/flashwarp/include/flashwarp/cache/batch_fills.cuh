// Fills for which nobody on the device waits: submitted to a batch (nvme/batch.cuh), and landed by
// whoever drains later.
//
// Nothing here waits, for storage or for other warps. A line whose set is locked or full of dirty
// lines, or whose command finds no room, is left as it is: a later access fetches it.
#pragma once

#include "flashwarp/cache/access.cuh"
#include "flashwarp/nvme/batch.cuh"

namespace fw::cache {

// How many rings a warp looks at for room.
inline constexpr uint32_t kRingsTried = 4;

// A queue pair with room, of those that follow the warp's seat; null if there is none.
FW_DEVICE nvme::queue_pair* ring_with_room(const volume& v, uint32_t mask) {
  const uint32_t seat = take_seat(mask);
  for (uint32_t k = 0; k < kRingsTried && k < v.queue_count; k++) {
    nvme::queue_pair& q = queue_of(v, seat + k);
    const uint32_t ticket = atomic::load_relaxed(&q.ticket);
    const bool open = nvme::room_of(q, ticket) != 0 && atomic::load_relaxed(&q.failed) == 0;
    if (warp::broadcast(mask, open, base::lowest_bit(mask))) return &q;
  }
  return nullptr;
}

// Submits detached reads for the lanes of `members`, as many as find room at once. Returns these.
FW_DEVICE_NOINLINE uint32_t submit_batch(line_cache& c, volume& v, nvme::queue_pair& q,
                                         uint32_t mask, uint32_t members, const transfer& t,
                                         nvme::batch& b) {
  uint32_t ticket;
  const uint32_t lanes = nvme::try_take_tickets(q, mask, members, ticket);
  if (lanes == 0) return 0;
  if ((lanes >> warp::lane()) & 1) {
    const uint64_t address = data_address(c, v, q, nvme::path_of(q), ticket, t);
    const nvme::detached_command what = detached_transfer(c, v, nvme::kRead, t, address);
    atomic::store_plain(&q.detached[nvme::entry_of(q, ticket)], what);
    nvme::command entry = line_command(c, v, q, nvme::kRead, ticket, t, address);
    entry.cdw3 = b.number;
    nvme::write_entry(q, ticket, entry, nvme::slot::kDetached);
  }
  if (warp::lane() == base::lowest_bit(mask)) {
    atomic::add_relaxed(&b.submitted, uint32_t(base::popcount(lanes)));
  }
  warp::sync(mask);
  nvme::publish(q, mask);
  return lanes;
}

// Undoes the begin of the write-backs that a claim has asked for: they would wait for a slot. The
// lines are dirty as before.
FW_DEVICE void leave_dirty(line_cache& c, const claim& mine) {
  if (mine.result == claim_result::kDirty) end_write(&c.geometry.tags[mine.way], false);
  if (mine.has_dirty) end_write(&c.geometry.tags[mine.dirty_way], false);
}

// Claims a frame for the line of each lane that `asks`, and submits its fill. Returns whether the
// lane's claim found its set locked, or its line being filled.
template <typename Policy>
FW_DEVICE bool submit_claims(line_cache& c, volume& v, uint32_t mask, bool asks, uint64_t line,
                             nvme::batch& b, tally& count) {
  nvme::queue_pair* const q = ring_with_room(v, mask);
  if (q == nullptr) return false;
  const geometry g = c.geometry;
  uint32_t kept;
  const claim mine = claim_lines<Policy>(c, g, mask, asks, line, purpose::kPrefetch, true, kept);
  leave_dirty(c, mine);
  const bool claimed = mine.result == claim_result::kClaimed;
  const bool was_kept = (kept >> warp::lane()) & 1;
  if (was_kept) publish_fill(c, mine.way, mine.word, false);
  const uint32_t claims = warp::ballot(mask, claimed);
  const uint32_t fills = claims & ~kept;
  const transfer t = {line, mine.way};
  uint32_t left = fills;
  if (fills != 0) {
    left = move_in_place(c, v, *q, mask, fills, nvme::kRead, t);
    if (((fills & ~left) >> warp::lane()) & 1) publish_fill(c, mine.way, mine.word, false);
    if (left != 0) left &= ~submit_batch(c, v, *q, mask, left, t, b);
    if ((left >> warp::lane()) & 1) abandon_fill(c, mine.way, mine.word);
  }
  count.misses += base::popcount(claims & ~left);
  count.evictions += base::popcount(warp::ballot(mask, mine.evicted));
  count.bytes_read += uint64_t(base::popcount(fills & ~left)) << g.line_shift;
  count.tier_hits += base::popcount(kept);
  count.tier_lines += base::popcount(warp::ballot(mask, mine.tier_to != kNoTierWay));
  return asks && mine.result == claim_result::kBusy;
}

// Submits the fill of each lane's line to the batch, if the line is absent. All lanes of `mask`
// call together. The volume has one namespace.
template <typename Policy>
FW_DEVICE_NOINLINE void submit_fills(line_cache& c, volume& v, uint32_t mask, bool wants,
                                     uint64_t line, nvme::batch& b, tally& count) {
  FW_ASSERT(v.spread == kOneNamespace);
  bool busy;
  const bool absent = wants && !probe(c.geometry, line, busy).found && !busy;
  const uint32_t missing = warp::ballot(mask, absent);
  if (missing == 0) return;
  bool asks = absent && base::lowest_bit(warp::match(missing, line)) == warp::lane();
  for (uint32_t k = 0; k < kPrefetchTries && warp::any(mask, asks); k++) {
    asks = submit_claims<Policy>(c, v, mask, asks, line, b, count);
  }
}

// Lands the lines of all commands that have completed. Waits for nothing.
FW_DEVICE void land_completed(line_cache& c, volume& v, uint32_t mask) {
  line_finisher finisher{c};
  // Each warp begins at another queue pair.
  for (uint32_t i = 0; i < v.queue_count; i += warp::count()) {
    nvme::queue_pair& q = v.queues[(warp::index() + i) % v.queue_count];
    while (nvme::drain(q, mask, finisher) != 0) {
    }
  }
}

}  // namespace fw::cache
