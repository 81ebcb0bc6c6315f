// One access by a warp: each lane names a line, and `access` runs its operation on the line's
// frame.
//
// The steps: probe; serve the hits; claim frames for the misses; fill them; serve; publish. If
// another warp fills the lane's line, the lane tries again later and helps meanwhile. The same
// operation `Op` runs on resident frames and on frames that this warp has just filled:
//   static constexpr bool kStores;   whether it writes the frame
//   void visit(here, members, frame) does the work of the lanes in `members`; `frame` is the
//                                    address of the lane's own frame. All lanes call it. It may run
//                                    again after a lost race.
#pragma once

#include "flashwarp/cache/lease.cuh"
#include "flashwarp/cache/owner_access.cuh"
#include "flashwarp/cache/tally.cuh"
#include "flashwarp/cache/tier_moves.cuh"

namespace fw::cache {

// The lanes that access lines of one volume together.
struct party {
  const geometry& g;  // the cache's; callers that have it in constant memory give that copy
  line_cache& c;
  volume& v;
  lanes here;
};

// What one of these lanes asks for.
struct request {
  uint64_t line;       // global
  bool wants = true;   // whether it asks at all
  bool whole = false;  // whether it overwrites the line whole
  // Whether all lanes have just looked for their lines in vain: they claim frames at once, because
  // the claim looks again.
  bool looked = false;
};

// Serves the lanes whose line is resident. Returns the lanes that it served.
template <typename Policy, typename Op>
FW_DEVICE lanes serve_hits(const geometry& g, lanes here, const place& at, Op& op) {
  uint64_t* word = &g.tags[at.way];
  bool usable = at.found;
  if constexpr (Op::kStores) usable = usable && try_pin(word, tag::identity_of(at.word));
  const lanes hits = here.ballot(usable);
  if (!hits) return {};
  op.visit(here, hits, reinterpret_cast<uint64_t>(frame_of(g, at.way)));
  if constexpr (Op::kStores) {
    here.sync();
    if (usable) {
      unpin(word, true);
      Policy::on_hit(g, at.way, at.word);
    }
    return hits;
  } else {
    // The loads of the frame, by this lane and by other lanes for it, come before the second look
    // at the tag. What `visit` stores is for the caller, who publishes it with a release of its
    // own.
    atomic::fence_acquire();
    here.sync();
    const bool served = usable && still_holds(g, at.way, at.word);
    if (served) Policy::on_hit(g, at.way, at.word);
    return here.ballot(served);
  }
}

// Writes the lines of `members`, which this warp has stored to, from frames that are BUSY, and
// empties these. Returns the lane's status. A line that could not be written keeps its frame: it is
// dirty then, as after any write-back.
FW_DEVICE uint32_t pass_lines(line_cache& c, volume& v, lanes here, lanes members,
                              const transfer& t, uint64_t busy_word) {
  const bool mine = members.mine();
  if (mine) count_write(c, v, t);
  const uint32_t status = move_lines(c, v, here, members, nvme::kWrite, t);
  if (!mine) return nvme::kSuccess;
  if (status == nvme::kSuccess) {
    abandon_fill(c, t.way, busy_word);
    return status;
  }
  atomic::store_release(&c.geometry.tags[t.way], tag::filled(busy_word, false) | tag::kWriting);
  return end_write_back(c, v, t, status);
}

// Fills the frames that the lanes of `fills` have claimed. Returns the lane's status.
FW_DEVICE uint32_t fill_claims(const party& by, lanes fills, const plain_source& source,
                               uint64_t line, uint64_t way) {
  if (!fills) return nvme::kSuccess;
  lanes left = fills;
  if (!by.here.any(!source.open)) {
    const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(by.g, way));
    left = read_frames(*source.queue, by.here, fills, fills, frame, source.address, source.bytes);
  }
  if (!left) return nvme::kSuccess;
  const uint32_t got = move_lines(by.c, by.v, by.here, left, nvme::kRead, {line, way});
  return left.mine() ? got : uint32_t(nvme::kSuccess);
}

// Writes the dirty victims of the lanes of `dirty` back. Returns the lane's status.
FW_DEVICE uint32_t clean_victims(const party& by, lanes dirty, const claim& mine, uint64_t line) {
  if (!dirty) return nvme::kSuccess;
  const uint32_t got =
      write_back(by.c, by.v, by.here, dirty, {tag::line_of(mine.word), mine.way}, false);
  if (!dirty.mine() || got == nvme::kSuccess) return nvme::kSuccess;
  // The error is in the record of the victim's volume. If `by.v` has another record, it needs the
  // error too, because this access fails.
  if (&volume_of(by.c, tag::line_of(mine.word)) != &by.v) {
    record_error(by.v, got, nvme::kWrite, line);
  }
  return got;
}

// Handles the lanes of `missing`. One leader for each line claims a frame and fills it. The lanes
// that want this line are served from it before it is published. If `kPasses`, the line only passes
// through its frame: it is in the storage when this returns, and the frame is empty.
template <bool kPasses, typename Policy, typename Op>
FW_DEVICE miss_outcome serve_by_claims(line_cache& c, volume& v, lanes here, lanes missing,
                                       const request& asked, Op& op, tally& count, purpose why) {
  const uint32_t lane = warp::lane();
  const uint64_t line = asked.line;
  const bool misses = missing.mine();
  const lanes group = misses ? missing.match(line) : lanes();
  const uint32_t leader = misses ? group.leader() : lane;
  // The line need not be read only if all lanes of the group overwrite it whole.
  const lanes wholes = here.ballot(misses && asked.whole);
  const bool overwrite = Op::kStores && (wholes & group) == group;
  const geometry g = c.geometry;
  const party by = {g, c, v, here};
  const plain_source source = plain_source_of(c, v, here, line);
  lanes kept;
  const claim mine =
      claim_lines<Policy>(c, g, here, misses && leader == lane, line, why, !overwrite, kept);

  const lanes ahead = here.ballot(mine.has_dirty);
  if (ahead) {
    write_back(c, v, here, ahead, {tag::line_of(mine.dirty_word), mine.dirty_way}, true);
  }
  const bool claimed = misses && leader == lane && mine.result == claim_result::kClaimed;
  const lanes claims = here.ballot(claimed);
  const lanes fills = here.ballot(claimed && !overwrite) - kept;
  uint32_t status = fill_claims(by, fills, source, line, mine.way);
  // Each lane gets its leader's frame and status.
  const bool led = misses && claims.has(leader);
  const uint64_t way = here.take(mine.way, leader);
  uint32_t outcome = here.take(status, leader);
  const lanes members = here.ballot(led && outcome == nvme::kSuccess);
  if (members) op.visit(here, members, reinterpret_cast<uint64_t>(frame_of(g, way)));
  here.sync();
  if (claimed) {
    if (status == nvme::kSuccess) {
      if (!kPasses) publish_fill(c, mine.way, mine.word, Op::kStores);
    } else {
      // On the direct route a command that has not come back may still write the frame, so the
      // frame stays BUSY.
      const bool outstanding = status == nvme::kTimedOut && v.path == nvme::kDirect;
      if (!outstanding) abandon_fill(c, mine.way, mine.word);
      record_error(v, status, nvme::kRead, line);
    }
  }
  if constexpr (kPasses) {
    const lanes passing = here.ballot(claimed && status == nvme::kSuccess);
    if (passing) {
      const uint32_t got = pass_lines(c, v, here, passing, {line, mine.way}, mine.word);
      if (passing.mine()) status = got;
      outcome = here.take(status, leader);
    }
  }

  // The claim gave a dirty victim: clean it, and claim the frame at the next try.
  const bool cleans = misses && leader == lane && mine.result == claim_result::kDirty;
  const lanes dirty = here.ballot(cleans);
  const uint32_t lost = here.take(clean_victims(by, dirty, mine, line), leader);

  count.misses += here.ballot(led).count();
  count.evictions += here.ballot(claimed && mine.evicted).count();
  count.bytes_read += uint64_t(fills.count()) << c.geometry.line_shift;
  count.tier_hits += kept.count();
  count.tier_lines += here.ballot(mine.tier_to != kNoTierWay).count();
  const bool found = here.any(misses && mine.result == claim_result::kHit);
  const uint32_t error = led ? outcome : (misses ? lost : 0);
  return {led || error != 0, bool(claims | dirty) || found, error};
}

// Functions that kernels call get the line and its flag one by one: a struct would be built in
// memory.
template <typename Policy, typename Op>
FW_DEVICE_NOINLINE miss_outcome serve_misses(line_cache& c, volume& v, lanes here, lanes missing,
                                             uint64_t line, bool whole, Op& op, tally& count) {
  if constexpr (base::kAsksOwner) {
    if (c.owner != nullptr) return ask_owner(c, v, here, missing, line, op, count);
  }
  return serve_by_claims<false, Policy>(c, v, here, missing, {line, true, whole}, op, count,
                                        purpose::kUse);
}

// How many steps of a wait a line that passes through a set gives others that do. It then takes a
// frame of its own: a command that never came back may hold the other for ever.
inline constexpr uint32_t kPassingTries = 1 << 14;

template <typename Policy, typename Op>
FW_DEVICE_NOINLINE miss_outcome pass_misses_through(line_cache& c, volume& v, lanes here,
                                                    lanes missing, uint64_t line, bool whole,
                                                    Op& op, tally& count, uint32_t step) {
  // A client's store is not in the storage when the owner has answered.
  if (base::kAsksOwner && c.owner != nullptr) {
    if (missing.mine()) record_error(v, kOwnersAlone, nvme::kWrite, line);
    return {missing.mine(), true, kOwnersAlone};
  }
  const purpose why = step < kPassingTries ? purpose::kPass : purpose::kUse;
  return serve_by_claims<true, Policy>(c, v, here, missing, {line, true, whole}, op, count, why);
}

// The status of a lane whose access was deferred. NVMe statuses have 15 bits.
inline constexpr uint32_t kDeferred = 1u << 31;

// What `access` does for lanes whose line is not resident: fetch it, and wait.
struct fetch_misses {
  static constexpr bool kDefers = false;
  static constexpr bool kPasses = false;
  FW_DEVICE static constexpr bool allowed() { return false; }
  FW_DEVICE static constexpr bool defer(lanes) { return false; }
};

// What it does for a store that leaves the line in the storage and no frame to it.
struct pass_misses : fetch_misses {
  static constexpr bool kPasses = true;
};

// `serve_misses`, if `misses` does not take the lanes of `rest`. One call for both, so that the
// loop over hits has one slow path.
template <typename Policy, typename Op, typename Misses>
FW_DEVICE_NOINLINE miss_outcome defer_misses(line_cache& c, volume& v, lanes here, lanes missing,
                                             uint64_t line, bool whole, Op& op, tally& count,
                                             lanes rest, const Misses& misses) {
  if (rest && misses.defer(rest)) {
    return {rest.mine(), true, kDeferred};
  }
  if (!missing) return {false, false, 0};
  return serve_misses<Policy>(c, v, here, missing, line, whole, op, count);
}

// Runs `op` on the frames of the lines that the lanes of `by` ask for. All of them call together.
// Returns the lane's NVMe status: kSuccess, or the error that is also in the volume's error record.
// If `misses.allowed()`, `misses.defer(lanes)` may take the lanes that are not served, and returns
// true. Their status is then kDeferred.
template <typename Policy, typename Op, typename Misses = fetch_misses>
FW_DEVICE uint32_t access(const party& by, const request& asked, Op& op, tally& count,
                          const Misses& misses = {}) {
  line_cache& c = by.c;
  volume& v = by.v;
  const lanes here = by.here;
  nvme::deadline limit(v.queues[0].data);
  uint32_t step = 0;
  uint32_t status = 0;
  bool pending = asked.wants;
  bool looked = asked.looked;
  // Only the owner of a shared cache stores to frames, so a client need not look for one.
  const bool sends = Op::kStores && base::kAsksOwner && c.owner != nullptr;
  while (here.any(pending)) {
    place at = {0, 0, false};
    bool busy = false;
    lanes hits;
    if (!looked && !sends) {
      if (pending) at = probe(by.g, asked.line, busy);
      hits = serve_hits<Policy>(by.g, here, at, op);
    }
    looked = false;
    count.hits += hits.count();
    if (hits.mine()) pending = false;
    // Make no claim for a line that is being filled: it would lock the set and find it BUSY again.
    // A client asks for it, because it cannot help the owner, whose next access may end the fill.
    if (base::kAsksOwner && busy) busy = c.owner == nullptr;
    const lanes missing = here.ballot(pending && !at.found && !busy);
    // Lanes that would wait for a fill, their own or another warp's. Lines that are overwritten
    // whole need none.
    const lanes rest = misses.allowed() ? here.ballot(pending && !asked.whole) : lanes();
    bool moved = hits.bits() != 0;
    if (missing | rest) {
      // Pass the addresses of copies, so that `op` and `misses` themselves stay in registers.
      Op cold = op;
      tally events;
      miss_outcome out;
      if constexpr (Misses::kDefers) {
        const Misses late = misses;
        out = base::opaque(&defer_misses<Policy, Op, Misses>)(
            c, v, here, missing, asked.line, asked.whole, cold, events, rest, late);
      } else if constexpr (Misses::kPasses) {
        out = base::opaque(&pass_misses_through<Policy, Op>)(c, v, here, missing, asked.line,
                                                             asked.whole, cold, events, step);
      } else {
        out = base::opaque(&serve_misses<Policy, Op>)(c, v, here, missing, asked.line, asked.whole,
                                                      cold, events);
      }
      op = cold;
      count.add(events);
      if (out.served) pending = false;
      if (out.served) status = out.status;
      moved = moved || out.moved;
    }
    if (moved || !here.any(pending)) continue;
    // After one wait of a volume ran out of time, its later waits end at once.
    if (here.any(limit.passed() || has_failed(v))) {
      atomic::store_relaxed(&failure_mark(v), 1u);
      if (!pending) return status;
      record_error(v, nvme::kTimedOut, nvme::kRead, asked.line);
      return nvme::kTimedOut;
    }
    base::opaque (&help_any)(c, v, here, step++);
  }
  return status;
}

// Claims a frame for the line of each lane that `asks`, and starts its fill. Returns whether the
// lane's claim found its set locked, or its line being filled.
template <typename Policy>
FW_DEVICE bool start_fills(line_cache& c, volume& v, lanes here, bool asks, uint64_t line,
                           tally& count) {
  const geometry g = c.geometry;
  lanes kept;
  const claim mine = claim_lines<Policy>(c, g, here, asks, line, purpose::kPrefetch, true, kept);
  // Start cleaning a dirty victim. A later call fills the line.
  const bool victim = mine.result == claim_result::kDirty;
  const lanes dirty = here.ballot(victim || mine.has_dirty);
  if (dirty) {
    const uint64_t word = victim ? mine.word : mine.dirty_word;
    write_back(c, v, here, dirty, {tag::line_of(word), victim ? mine.way : mine.dirty_way}, true);
  }
  if (kept.mine()) publish_fill(c, mine.way, mine.word, false);
  const lanes claims = here.ballot(mine.result == claim_result::kClaimed);
  const lanes fills = claims - kept;
  if (fills) {
    move_lines_detached(c, v, here, fills, nvme::kRead, {line, mine.way});
  }
  count.misses += claims.count();
  count.evictions += here.ballot(mine.evicted).count();
  count.bytes_read += uint64_t(fills.count()) << c.geometry.line_shift;
  count.tier_hits += kept.count();
  count.tier_lines += here.ballot(mine.tier_to != kNoTierWay).count();
  return asks && mine.result == claim_result::kBusy;
}

// How often a prefetch asks for a frame whose set is locked. The lock is held for a few loads only,
// and a line that is not prefetched costs its reader a whole transfer.
inline constexpr uint32_t kPrefetchTries = 16;

// Starts the fill of each lane's line, if the line is absent and a frame is free. Waits for ring
// space only. In place the line is there when this returns. All lanes of `here` call together.
//
// If GPUs share the cache, no fill is left in flight for which nobody waits: a kernel of another
// GPU, which does not drain our queues, would wait for it until one of ours runs.
template <typename Policy>
FW_DEVICE_NOINLINE void prefetch(line_cache& c, volume& v, lanes here, bool wants, uint64_t line,
                                 tally& count) {
  bool busy;
  const bool absent = wants && !probe(c.geometry, line, busy).found && !busy;
  const lanes missing = here.ballot(absent);
  if (!missing) return;
  bool asks = absent && missing.match(line).leads();
  if constexpr (base::kGpusShare) asks = plain_source_of(c, v, here, line).open && asks;
  if constexpr (base::kAsksOwner) {
    if (c.owner != nullptr) {
      // The access counts, as a hit or as a miss.
      if (asks) ask_ahead(*c.owner, line << c.geometry.line_shift, bytes_of_line(c, v, line));
      return;
    }
  }
  for (uint32_t k = 0; k < kPrefetchTries && here.any(asks); k++) {
    asks = start_fills<Policy>(c, v, here, asks, line, count);
  }
}

}  // namespace fw::cache
