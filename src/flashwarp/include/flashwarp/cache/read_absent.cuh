// Reads around the cache by a warp, for kernels that ask for it (`fw::read_around` of a file).
//
// A line that is in a frame is read there. The bytes of an absent line go from the storage to the
// caller: in place; or by a command for the blocks that have them, into the buffer of the command's
// slot. No frame is claimed, and so no line is evicted.
//
// If no frame holds the line, all stores that have ended are in the storage, and the look at the
// tags has acquired them. A store that ends later may be seen, in part or not at all. So there is
// no second look at the tags, but one at the path, because the host may have given up a file's
// lease.
//
// Through the cache goes what has no other way: volumes of several namespaces or parts, and
// commands on the direct route, which can only fill frames. On that path threads of the CPU device
// copy what is in the page cache.
#pragma once

#include "flashwarp/cache/read_around.cuh"

namespace fw::cache {

// How often a lane looks for its line before it goes through the cache. It looks again only after a
// lost race, or after the host has left the path.
inline constexpr uint32_t kAroundTries = 4;

// What a lane has read around the cache.
struct around_count {
  uint32_t pieces = 0;
  uint64_t bytes = 0;

  FW_DEVICE void add_to(const volume& v) const {
    if (pieces == 0) return;
    counters& shard = shard_of(v);
    atomic::add_relaxed(&shard.misses, uint64_t(pieces));
    atomic::add_relaxed(&shard.bypasses, uint64_t(pieces));
    atomic::add_relaxed(&shard.bytes_read, bytes);
    atomic::add_relaxed(&shard.kernel_misses, uint64_t(pieces));
    atomic::add_relaxed(&shard.kernel_bytes_read, bytes);
  }
};

// The blocks of a line that have a piece of it, as bytes of the line.
struct block_range {
  uint64_t begin;
  uint64_t bytes;
};
FW_DEVICE block_range blocks_of(const nvme::queue_pair& q, uint64_t offset, uint64_t bytes) {
  const uint32_t shift = q.drive == nullptr ? nvme::kLbaShift : q.drive->lba_shift;
  const uint64_t begin = offset >> shift << shift;
  const uint64_t end = (offset + bytes + (uint64_t(1) << shift) - 1) >> shift << shift;
  return {begin, end - begin};
}

// What became of a lane's piece.
struct around_outcome {
  bool ended = false;
  uint32_t status = nvme::kSuccess;
};

// Reads the pieces of one bundle by commands. Returns the lane's status; `again` says whether the
// lane must look again, because the host has left the path.
template <typename Op>
FW_DEVICE uint32_t read_blocks(line_cache& c, const volume& v, nvme::queue_pair& q, lanes here,
                               lanes bundle, uint64_t line, Op& op, around_count& count,
                               bool& again) {
  line_finisher finisher{c};
  const bool mine = bundle.mine();
  const uint32_t ticket = nvme::take_tickets(q, here, bundle);
  again = false;
  if (!nvme::wait_for_slots(q, here, bundle, ticket, finisher)) {
    return mine ? nvme::kTimedOut : uint32_t(nvme::kSuccess);
  }
  const block_range blocks = blocks_of(q, op.offset, op.bytes);
  uint64_t address = 0;
  if (mine) {
    const uint64_t byte = ((line - v.line_begin) << c.geometry.line_shift) + blocks.begin;
    const bool in_place = nvme::path_of(q) == nvme::kInPlace;
    address = in_place ? q.data.mapped_base + byte : nvme::buffer_of(q, ticket);
    const nvme::command entry =
        nvme::block_command(nvme::kRead, uint16_t(nvme::entry_of(q, ticket)),
                            byte >> nvme::kLbaShift, uint32_t(blocks.bytes >> nvme::kLbaShift),
                            address, nvme::second_prp(address, blocks.bytes, c.page_bytes));
    nvme::write_entry(q, ticket, entry, 0);
  }
  here.sync();
  nvme::publish(q, here);
  const uint32_t status = nvme::wait_for_completions(q, here, bundle, ticket, finisher);
  const lanes arrived = here.ballot(mine && status == nvme::kSuccess);
  if (arrived) op.template copy<warp::source::kStorage>(here, arrived, address - blocks.begin);
  if (q.data.leased != 0) {
    finish_loads(here);
    // Also after a failure: the file may have been cut before the path changed.
    again = mine && status != nvme::kTimedOut && !nvme::is_current(q, address);
  }
  // The slot of a command that never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
  if (mine && status == nvme::kSuccess && !again) {
    count.pieces++;
    count.bytes += blocks.bytes;
  }
  return status;
}

// Reads the pieces of `members` by commands, as many at a time as the ring has slots.
template <typename Op>
FW_DEVICE around_outcome read_by_commands(line_cache& c, const volume& v, nvme::queue_pair& q,
                                          lanes here, lanes members, uint64_t line, Op& op,
                                          around_count& count) {
  around_outcome out;
  while (members) {
    const lanes bundle = first_bundle(q, members);
    members -= bundle;
    bool again;
    const uint32_t status = read_blocks(c, v, q, here, bundle, line, op, count, again);
    if (bundle.mine() && !again) out = {true, status};
  }
  return out;
}

// Copies a piece out of the page cache, by a thread of the CPU device.
template <typename Op>
FW_DEVICE bool copy_cached(const nvme::queue_pair& q, uint64_t begin, const Op& op) {
  const base::host_source from = cached_source(q);
  base::host_copy copy = {begin + op.offset, op.buffer, op.bytes, false};
  if (from.copy != nullptr) from.copy(from.source, &copy, 1);
  return copy.done;
}

// Reads the pieces of `members`, whose lines are absent, without frames. All lanes of `here` call
// together. A piece that has not ended is looked for again.
template <typename Op>
FW_DEVICE_NOINLINE around_outcome read_absent(line_cache& c, volume& v, lanes here, lanes members,
                                              uint64_t line, Op& op, around_count& count) {
  around_outcome out;
  nvme::queue_pair& q = queue_of(v, take_seat(here));
  if (v.spread != kOneNamespace || q.parts != nullptr) return out;
  const bool mine = members.mine();
  const uint64_t begin = (line - v.line_begin) << c.geometry.line_shift;
  // Lanes may see different paths while the host leaves this one; all of them must go one way.
  const uint32_t path = nvme::path_of(q);
  const bool in_place = !here.any(path != nvme::kInPlace);
  if (here.any(path == nvme::kDirect)) {
    if constexpr (warp::kWarpWidth == 1) out.ended = mine && copy_cached(q, begin, op);
  } else if (in_place && q.plain_reads != 0) {
    op.template copy<warp::source::kStorage>(here, members, q.data.mapped_base + begin);
    if (q.data.leased != 0) finish_loads(here);
    out.ended = mine && nvme::is_current(q, q.data.mapped_base);
  } else {
    return read_by_commands(c, v, q, here, members, line, op, count);
  }
  if (out.ended) {
    count.pieces++;
    count.bytes += op.bytes;
  }
  return out;
}

// Runs `op`, which loads, on the line of each lane that `wants`, around the cache. Beside what
// `access` needs, `op` has `offset`, `bytes` and `buffer` of its piece, and `copy`, which does what
// `visit` does with lines in the storage. All lanes of `here` call together. Returns the lane's
// NVMe status, as `access`.
template <typename Policy, typename Op>
FW_DEVICE uint32_t access_around(line_cache& c, volume& v, lanes here, bool wants, uint64_t line,
                                 Op& op, tally& hits, around_count& count) {
  const geometry& g = c.geometry;
  uint32_t status = nvme::kSuccess;
  bool pending = wants;
  for (uint32_t tries = 0; tries < kAroundTries && here.any(pending); tries++) {
    place at = {0, 0, false};
    if (pending) at = probe(g, line);
    const lanes served = serve_hits<Policy>(g, here, at, op);
    hits.hits += served.count();
    if (served.mine()) pending = false;
    const lanes absent = here.ballot(pending && !at.found);
    if (!absent) continue;
    const around_outcome got = read_absent(c, v, here, absent, line, op, count);
    if (!got.ended) continue;
    pending = false;
    status = got.status;
    if (status != nvme::kSuccess) record_error(v, status, nvme::kRead, line);
  }
  if (!here.any(pending)) return status;
  const uint32_t got = access<Policy>({g, c, v, here}, {line, pending}, op, hits);
  return pending ? got : status;
}

}  // namespace fw::cache
