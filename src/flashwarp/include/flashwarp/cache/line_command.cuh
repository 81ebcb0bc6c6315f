// One NVMe command for one line: submitted, landed, ended.
//
// The route decides what a warp copies. On the direct route the controller reads and writes the
// frame itself. Otherwise the warp copies the frame to where a write command finds it (stage), or
// the data of a read command to the frame (land). Each lane has a line of its own; all lanes copy
// each of them together.
#pragma once

#include "flashwarp/base/copy.cuh"
#include "flashwarp/cache/placement.cuh"

namespace fw::cache {

// The transfer of one lane.
struct transfer {
  uint64_t line;  // global line number
  uint64_t way;   // the frame
};

// Ends a copy out of a namespace in place: the loads of all lanes come before any lane's second
// look at the path.
FW_DEVICE void finish_loads(lanes here) {
  // Acquire what the loads saw: see `nvme::is_current`.
  atomic::fence_system();
  here.sync();
}

// Finishes detached fills and write-backs, in the warp that drains their completions.
struct line_finisher {
  line_cache& cache;

  // Copies the data of the reads among `members` to their frames. Returns the lane's status. A read
  // fails if the host left the path meanwhile (`nvme::is_current`).
  FW_DEVICE uint32_t land(nvme::queue_pair& q, lanes here, lanes members,
                          const nvme::detached_command& what, uint32_t status) {
    if (nvme::path_of(q) == nvme::kDirect) return status;
    const bool read = what.opcode == nvme::kRead && status == nvme::kSuccess;
    const lanes reads = members & here.ballot(read);
    if (!reads) return status;
    // The tags went BUSY before these stores (see `open_sets`), in another warp perhaps.
    atomic::fence();
    warp::copy_each<warp::source::kStream>(here, reads, what.frame, what.source, what.bytes);
    if (q.data.leased == 0) return status;
    finish_loads(here);
    return read && !nvme::is_current(q, what.source) ? uint32_t(nvme::kCommandAborted) : status;
  }

  // Ends one command, after `land`. One lane, synchronised with all lanes that copied.
  FW_DEVICE void end(const nvme::detached_command& what, uint32_t status) {
    uint64_t* word = reinterpret_cast<uint64_t*>(what.tag);
    if (what.opcode == nvme::kRead) {
      // A failed prefetch leaves the line absent: the read that needs the line gets the error.
      const uint64_t busy = atomic::load_relaxed(word);
      atomic::store_release(
          word, status == nvme::kSuccess ? tag::filled(busy, false) : tag::emptied(busy));
      return;
    }
    // Only the last replica's completion ends the write-back.
    uint32_t* count = reinterpret_cast<uint32_t*>(what.source);
    if (count != nullptr && !finish_replica(count, status)) return;
    const uint64_t line = tag::line_of(atomic::load_relaxed(word));
    if (status != nvme::kSuccess) record_error(volume_of(cache, line), status, what.opcode, line);
    end_write(word, status == nvme::kSuccess);
  }
};

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
  return nvme::block_command(opcode, uint16_t(nvme::entry_of(q, ticket)), lba, blocks, address,
                             nvme::second_prp(address, bytes, c.page_bytes));
}

// Copies frames to where write commands find them, before the commands are written to the ring; or
// to the namespace itself.
FW_DEVICE_NOINLINE void stage_writes(const line_cache& c, const volume& v,
                                     const nvme::queue_pair& q, lanes here, lanes members,
                                     const transfer& t, uint64_t address) {
  if (nvme::path_of(q) == nvme::kDirect) return;
  // Each lane has acquired its own line and slot; now all lanes read and write all of them.
  here.sync();
  const uint64_t frame = reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way));
  warp::copy_each<warp::source::kFrame>(here, members, address, frame, bytes_of_line(c, v, t.line));
  // The copies of all lanes come before any lane's command, or its end of the write-back.
  here.sync();
  atomic::fence_system();
}

// Copies lines of read commands, or of the namespace itself, to the frames of `members`, which this
// warp has claimed (see `open_sets`). Returns the lanes of `ended` that must read again, because
// the host left the path.
FW_DEVICE lanes read_frames(const nvme::queue_pair& q, lanes here, lanes ended, lanes members,
                            uint64_t frame, uint64_t address, uint64_t bytes) {
  warp::copy_each<warp::source::kStream>(here, members, frame, address, bytes);
  if (q.data.leased == 0) {
    here.sync();
    return {};
  }
  finish_loads(here);
  // A lane whose command failed reads again too: the file may have been cut before the path
  // changed.
  const bool ours = ended.mine();
  return here.ballot(ours && !nvme::is_current(q, address));
}

// As read_frames, for the commands that `ended`. On the direct route the data is there already.
FW_DEVICE_NOINLINE lanes land_reads(const line_cache& c, const volume& v, const nvme::queue_pair& q,
                                    lanes here, lanes ended, lanes members, const transfer& t,
                                    uint64_t address) {
  // Each lane has acquired its own completion; now all lanes read all of the data.
  here.sync();
  if (nvme::path_of(q) == nvme::kDirect) members = {};
  return read_frames(q, here, ended, members,
                     reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way)), address,
                     bytes_of_line(c, v, t.line));
}

// Where a lane finds its line, if the warp can read the namespace without commands. A warp looks
// this up ahead of its claim, so that the loads of both are in flight together.
struct plain_source {
  const nvme::queue_pair* queue;
  uint64_t address;
  uint64_t bytes;
  bool open;  // no other lane's: lanes may see different paths
};
FW_DEVICE plain_source plain_source_of(const line_cache& c, const volume& v, lanes here,
                                       uint64_t line) {
  const nvme::queue_pair& q = queue_of(v, take_seat(here));
  // Relaxed, and looked at again behind the copy: see `nvme::path_of`.
  const uint32_t path = atomic::load_relaxed_system(&q.data.path);
  const bool open = (v.spread == kOneNamespace) & (q.plain_reads != 0) & (path == nvme::kInPlace);
  const uint64_t offset = (line - v.line_begin) << c.geometry.line_shift;
  return {&q, q.data.mapped_base + offset, bytes_of_line(c, v, line), open};
}

// Where a thread of the CPU device may copy from without commands; none on other devices.
FW_DEVICE base::host_source cached_source(const nvme::queue_pair& q) {
  if (q.cached_reads == 0 || nvme::path_of(q) != nvme::kDirect) return {};
  return base::host_source_of(q.sq);
}

// Fills a frame, which this thread has claimed, from the page cache. Returns false if the line
// needs a command.
FW_DEVICE bool fill_from_cached(const line_cache& c, const volume& v, const nvme::queue_pair& q,
                                const transfer& t) {
  const base::host_source from = cached_source(q);
  if (from.copy == nullptr) return false;
  base::host_copy copy = {line_in_namespace(v, t.line) << c.geometry.line_shift,
                          reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way)),
                          bytes_of_line(c, v, t.line), false};
  from.copy(from.source, &copy, 1);
  return copy.done;
}

// Reads the lines of `members` from the parts of a namespace. A line may lie in several of them.
// Returns the lanes that must read again, as `read_frames`.
FW_DEVICE_NOINLINE lanes read_parts(const line_cache& c, const volume& v, const nvme::queue_pair& q,
                                    lanes here, lanes members, const transfer& t) {
  const bool mine = members.mine();
  uint64_t at = line_in_namespace(v, t.line) << c.geometry.line_shift;
  uint64_t left = mine ? bytes_of_line(c, v, t.line) : 0;
  uint64_t frame = reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way));
  uint64_t number = mine ? nvme::find_part(q.parts, q.part_count, at) : 0;
  lanes again;
  // Each lane has acquired its own line; now all lanes copy all of them.
  here.sync();
  for (; here.any(left != 0); number++) {
    const lanes now = here.ballot(left != 0);
    uint64_t address = 0;
    uint64_t bytes = 0;
    if (left != 0) {
      const nvme::namespace_part part = q.parts[number];
      address = part.base + at;
      bytes = part.end - at < left ? part.end - at : left;
    }
    again |= read_frames(q, here, now, now, frame, address, bytes);
    at += bytes;
    frame += bytes;
    left -= bytes;
  }
  return again;
}

// Moves the lines of `members` in place, or out of the page cache, without commands, if the queue
// pair permits that. Returns the lanes that need a command: all, or those that have read while the
// host left the path.
FW_DEVICE lanes move_in_place(const line_cache& c, const volume& v, const nvme::queue_pair& q,
                              lanes here, lanes members, uint8_t opcode, const transfer& t) {
  const bool reads = opcode == nvme::kRead;
  if constexpr (warp::kWarpWidth == 1) {
    if (reads && members && fill_from_cached(c, v, q, t)) return {};
  }
  const bool in_parts = reads && q.parts != nullptr;
  if ((reads ? q.plain_reads : q.plain_writes) == 0 && !in_parts) return members;
  // Lanes may see different paths while the host leaves this one; all of them must go one way.
  if (here.any(nvme::path_of(q) != nvme::kInPlace)) return members;
  if (in_parts) return read_parts(c, v, q, here, members, t);
  const bool mine = members.mine();
  const uint64_t address = mine ? data_address(c, v, q, nvme::kInPlace, 0, t) : 0;
  if (reads) return land_reads(c, v, q, here, members, members, t, address);
  stage_writes(c, v, q, here, members, t, address);
  return {};
}

// What ends a detached transfer. `address` is where a read finds its data.
FW_DEVICE nvme::detached_command detached_transfer(const line_cache& c, const volume& v,
                                                   uint8_t opcode, const transfer& t,
                                                   uint64_t address) {
  return {reinterpret_cast<uint64_t>(&c.geometry.tags[t.way]),
          reinterpret_cast<uint64_t>(frame_of(c.geometry, t.way)),
          opcode == nvme::kWrite ? replica_count(v, t.way) : address, opcode,
          uint32_t(bytes_of_line(c, v, t.line))};
}

// The lowest lanes of `members`, at most as many as the ring has slots.
FW_DEVICE lanes first_bundle(const nvme::queue_pair& q, lanes members) {
  lanes bundle;
  for (uint32_t n = 0; members && n < (1u << q.depth_log2); n++) {
    bundle |= members.first();
    members -= members.first();
  }
  return bundle;
}

// A warp's commands to one ring: one for the line of each lane in `members`.
struct line_request {
  line_cache& c;
  volume& v;
  nvme::queue_pair& q;
  lanes here;
  lanes members;
  uint8_t opcode;
  const transfer& t;
  // Of the lane's command, once it is submitted: its ticket, and where its data is.
  uint32_t ticket;
  uint64_t address;
};

// Submits the commands, at most as many as the ring has slots. Returns false if the slots did not
// come free in time.
FW_DEVICE_NOINLINE bool submit_lines(line_request& r, bool detached) {
  line_finisher finisher{r.c};
  const bool mine = r.members.mine();
  r.ticket = nvme::take_tickets(r.q, r.here, r.members);
  if (!nvme::wait_for_slots(r.q, r.here, r.members, r.ticket, finisher)) return false;
  r.address = mine ? data_address(r.c, r.v, r.q, nvme::path_of(r.q), r.ticket, r.t) : 0;
  if (r.opcode == nvme::kWrite) stage_writes(r.c, r.v, r.q, r.here, r.members, r.t, r.address);
  if (mine) {
    if (detached) {
      const nvme::detached_command what = detached_transfer(r.c, r.v, r.opcode, r.t, r.address);
      atomic::store_plain(&r.q.detached[nvme::entry_of(r.q, r.ticket)], what);
    }
    const nvme::command entry = line_command(r.c, r.v, r.q, r.opcode, r.ticket, r.t, r.address);
    nvme::write_entry(r.q, r.ticket, entry, detached ? nvme::slot::kDetached : 0);
  }
  r.here.sync();
  nvme::publish(r.q, r.here);
  return true;
}

// Ends the commands; each lane has its own `status`. Lands the data of reads and frees the slots.
// Returns the lanes that must read again.
FW_DEVICE lanes end_lines(const line_request& r, uint32_t status) {
  const bool mine = r.members.mine();
  lanes again;
  if (r.opcode == nvme::kRead) {
    const lanes arrived = r.here.ballot(mine && status == nvme::kSuccess);
    const lanes ended = r.here.ballot(mine && status != nvme::kTimedOut);
    again = land_reads(r.c, r.v, r.q, r.here, ended, arrived, r.t, r.address);
  }
  // The slot of a command that never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(r.q, r.ticket);
  return again;
}

// Ends a detached transfer for which no slot came free. The queue pair is dead then, and this may
// be the only thread to notice. So a failed prefetch is recorded as well, unless another replica
// can answer the reads.
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

// Moves the line of each lane of `members` now, if that takes no command; else submits a detached
// command. In place a command would save nothing: some warp has to copy the line either way.
FW_DEVICE_NOINLINE void move_detached_on(line_cache& c, volume& v, nvme::queue_pair& q, lanes here,
                                         lanes members, uint8_t opcode, const transfer& t) {
  const lanes left = move_in_place(c, v, q, here, members, opcode, t);
  if ((members - left).mine()) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
  members = left;
  while (members) {
    const lanes bundle = first_bundle(q, members);
    members -= bundle;
    line_request r = {c, v, q, here, bundle, opcode, t, 0, 0};
    if (submit_lines(r, true)) continue;
    if (bundle.mine()) give_up_detached(c, v, opcode, t);
  }
}

}  // namespace fw::cache
