// The misses and stores of a client of a shared cache: the owner makes the access.
//
// The operation runs on the buffer of the thread's request, as it does on a frame. An operation
// that stores says what bytes of the line: `stored()` returns them as a `line_part`. One that
// cannot, because it loads what it changes, is refused with kOwnersAlone.
#pragma once

#include "flashwarp/cache/tally.cuh"
#include "flashwarp/cache/write_back.cuh"

namespace fw::cache {

// What became of a lane's miss.
struct miss_outcome {
  bool served;
  bool moved;  // there was progress: do not back off
  uint32_t status;
};

struct line_part {
  uint64_t offset;
  uint64_t bytes;
};

// How long a thread of a GPU pauses between looks for its answer, which take the link from the
// answers. One comes after a hundred microseconds or so.
inline constexpr uint32_t kAnswerLookNs = FW_ON_GPU ? 8'000 : nvme::kBackOffNs;

// Waits until the owner has answered the lanes of `asking`. Returns the lane's status: kTimedOut if
// time ran out, or if the host has found the owner gone.
FW_DEVICE uint32_t wait_for_owner(const owner_requests& o, volume& v, lanes here, lanes asking,
                                  uint32_t slot) {
  nvme::deadline limit(v.queues[0].data);
  bool pending = asking.mine();
  uint32_t status = nvme::kSuccess;
  while (true) {
    if (pending) pending = !has_answer(o, slot, status);
    if (!here.any(pending)) return status;
    if (here.any(limit.passed() || has_failed(v))) {
      atomic::store_relaxed(&failure_mark(v), 1u);
      return pending ? nvme::kTimedOut : status;
    }
    base::pause(kAnswerLookNs);
  }
}

// Lets the owner serve the lanes of `missing`, as far as there are free slots. No lane waits for a
// slot here, because it might wait for one that another lane of its warp holds.
template <typename Op>
FW_DEVICE miss_outcome ask_owner(line_cache& c, volume& v, lanes here, lanes missing, uint64_t line,
                                 Op& op, tally& count) {
  owner_requests& o = *c.owner;
  const bool misses = missing.mine();
  line_part part = {0, 0};
  bool told = true;
  if constexpr (!Op::kStores) {
    if (misses) part.bytes = bytes_of_line(c, v, line);
  } else if constexpr (requires { op.stored(); }) {
    part = op.stored();
  } else {
    told = false;
  }
  if (!told) {
    if (misses) record_error(v, kOwnersAlone, nvme::kWrite, line);
    return {misses, true, kOwnersAlone};
  }
  // Lanes that load from one line share an answer.
  uint32_t leader = warp::lane();
  if constexpr (!Op::kStores) {
    if (misses) leader = missing.match(line).leader();
  }
  uint32_t slot = kNoSlot;
  if (misses && leader == warp::lane()) slot = take_slot(o);
  const bool mine = slot != kNoSlot;
  const lanes asking = here.ballot(mine);
  if (!asking) return {false, false, nvme::kSuccess};
  uint64_t buffer = mine ? reinterpret_cast<uint64_t>(buffer_of(o, slot)) : 0;
  if constexpr (Op::kStores) {
    op.visit(here, asking, buffer - part.offset);
    // All lanes' stores to a buffer come before its lane asks.
    here.sync();
  }
  if (mine) {
    const uint64_t begin = (line << c.geometry.line_shift) + part.offset;
    ask(o, slot, Op::kStores ? kOwnerStore : kOwnerRead, begin, part.bytes);
  }
  const uint32_t status = wait_for_owner(o, v, here, asking, slot);
  const bool led = misses && asking.has(leader);
  const uint32_t outcome = here.take(status, leader);
  if constexpr (!Op::kStores) {
    buffer = here.take(buffer, leader);
    const lanes members = here.ballot(led && outcome == nvme::kSuccess);
    // Each lane has the owner's bytes behind its leader's look, as `visit` has all of them.
    here.sync();
    if (members) op.visit(here, members, buffer);
    // All lanes have read a buffer before its lane frees the slot.
    here.sync();
  }
  if (mine && status != nvme::kTimedOut) free_slot(o, slot);
  if (mine && status != nvme::kSuccess) {
    record_error(v, status, Op::kStores ? nvme::kWrite : nvme::kRead, line);
  }
  if (Op::kStores && mine) atomic::add_relaxed(&shard_of(v).bytes_written, part.bytes);
  count.misses += here.ballot(led).count();
  return {led, true, led ? outcome : uint32_t(nvme::kSuccess)};
}

}  // namespace fw::cache
