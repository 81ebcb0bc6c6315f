// Moves lines between frames and the namespace: fills and write-backs, waited for or detached.
//
// A waited-for transfer submits one command for each lane, waits, moves the data of each lane with
// the whole warp, and frees the slots. A detached one returns at once: the warp that drains its
// completion finishes it through `line_finisher`. If the warp can reach the namespace itself,
// either one copies the lines at once and submits nothing. Slots always come free. Between taking a
// slot and freeing it a warp waits for completions and, if a volume has several namespaces, for
// slots of later rings (spread.cuh), but never for lines.
#pragma once

#include "flashwarp/cache/spread.cuh"

namespace fw::cache {

// Transfers one line for each lane of `members` and waits. Returns the lane's status.
FW_DEVICE_NOINLINE uint32_t move_lines(line_cache& c, volume& v, lanes here, lanes members,
                                       uint8_t opcode, const transfer& t) {
  if (v.spread != kOneNamespace) return move_lines_spread(c, v, here, members, opcode, t);
  nvme::queue_pair& q = queue_of(v, take_seat(here));
  line_finisher finisher{c};
  uint32_t status = 0;
  members = move_in_place(c, v, q, here, members, opcode, t);
  while (members) {
    const lanes bundle = first_bundle(q, members);
    const bool mine = bundle.mine();
    members -= bundle;
    line_request r = {c, v, q, here, bundle, opcode, t, 0, 0};
    if (!submit_lines(r, false)) {
      if (mine) status = nvme::kTimedOut;
      continue;
    }
    const uint32_t got = nvme::wait_for_completions(q, here, bundle, r.ticket, finisher);
    if (mine) status = got;
    members |= end_lines(r, got);
  }
  return status;
}

// Starts one transfer for each lane of `members`, and waits for ring space only. In place it is
// over when this returns.
FW_DEVICE_NOINLINE void move_lines_detached(line_cache& c, volume& v, lanes here, lanes members,
                                            uint8_t opcode, const transfer& t) {
  if (v.spread != kOneNamespace) return move_detached_spread(c, v, here, members, opcode, t);
  move_detached_on(c, v, queue_of(v, take_seat(here)), here, members, opcode, t);
}

}  // namespace fw::cache
