"""Mistakes in `flashwarp/cache/line_command.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/line_command.cuh"

_LAND = """\
  if (r.opcode == nvme::kRead) {
    const lanes arrived = r.here.ballot(mine && status == nvme::kSuccess);
    const lanes ended = r.here.ballot(mine && status != nvme::kTimedOut);
    again = land_reads(r.c, r.v, r.q, r.here, ended, arrived, r.t, r.address);
  }
"""

_RELEASE = """\
  // The slot of a command that never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(r.q, r.ticket);
"""

_NOTE = """\
      atomic::store_plain(&r.q.detached[nvme::entry_of(r.q, r.ticket)], what);
"""

_MARK = """\
    const nvme::command entry = line_command(r.c, r.v, r.q, r.opcode, r.ticket, r.t, r.address);
    nvme::write_entry(r.q, r.ticket, entry, FLAGS);
"""

_DETACHED_IN_PLACE = """\
  const lanes left = move_in_place(c, v, q, here, members, opcode, t);
  if ((members - left).mine()) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
"""

_DETACHED_EARLY = """\
  const bool early = opcode == nvme::OPCODE &&
                     (opcode == nvme::kRead ? q.plain_reads : q.plain_writes) != 0 &&
                     nvme::path_of(q) == nvme::kInPlace;
  if (early && members.mine()) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
  const lanes left = move_in_place(c, v, q, here, members, opcode, t);
  if (!early && (members - left).mine()) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
"""

MUTANTS = (
    Mutant(
        "slot-freed-early",
        _LAND + _RELEASE,
        _RELEASE + _LAND,
        "the next command's data replaces ours in the slot's buffer before we have read it",
        "elements",
    ),
    Mutant(
        "first-replica-ends",
        "    if (count != nullptr && !finish_replica(count, status)) return;\n",
        "    (void)count;\n",
        "a line counts as written when the first replica has it",
        "replicate",
    ),
    Mutant(
        "detached-noted-late",
        _NOTE + "    }\n" + _MARK.replace("FLAGS", "detached ? nvme::slot::kDetached : 0"),
        _MARK.replace("FLAGS", "nvme::slot::kDetached")
        + _NOTE
        + "    } else {\n"
        + _MARK.replace("FLAGS", "0")
        + "    }\n",
        "a command that nobody waits for is finished as what the entry was for before",
        "async",
        "weak",
    ),
    Mutant(
        "landing-unsynchronised",
        "  // Each lane has acquired its own completion; now all lanes read all of the"
        " data.\n  here.sync();\n",
        "",
        "lanes read a buffer whose completion only a neighbour has acquired",
        "elements",
        "weak",
        4,
    ),
    Mutant(
        "staging-unsynchronised",
        "  // Each lane has acquired its own line and slot; now all lanes read and write all of"
        " them.\n  here.sync();\n",
        "",
        "lanes write a buffer whose slot only a neighbour has acquired",
        "elements",
        "weak",
        4,
    ),
    Mutant(
        "prefetch-dies-silently",
        "  if (opcode == nvme::kWrite || v.spread != kReplicated) {\n",
        "  if (opcode == nvme::kWrite) {\n",
        "a queue pair dies under a prefetch, and nobody is told",
        "prefetch_lost",
    ),
    Mutant(
        "pages-left-unseen-plain",
        "  if (reads) return land_reads(c, v, q, here, members, members, t, address);\n",
        "  if (reads) {\n"
        "    land_reads(c, v, q, here, members, members, t, address);\n"
        "    return {};\n"
        "  }\n",
        "so does a fill that took no command",
        "leases",
    ),
    Mutant(
        "pages-left-unseen-in-parts",
        "    again |= read_frames(q, here, now, now, frame, address, bytes);\n",
        "    read_frames(q, here, now, now, frame, address, bytes);\n",
        "so does one from the parts of a namespace",
        "leases",
    ),
    Mutant(
        "plain-reads-of-some-lanes",
        "  if (here.any(nvme::path_of(q) != nvme::kInPlace)) return members;\n",
        "  if (nvme::path_of(q) != nvme::kInPlace) return members;\n",
        "lanes of a warp that see the path change go two ways",
        "leases",
        width=4,
    ),
    Mutant(
        "pages-left-counted-ahead",
        "  if ((members - left).mine()) {\n",
        "  if (members.mine()) {\n",
        "so does a prefetch that took no command",
        "leases",
    ),
    Mutant(
        "plain-write-over-early",
        _DETACHED_IN_PLACE,
        _DETACHED_EARLY.replace("OPCODE", "kWrite"),
        "a write-back is over before the namespace has the line, and its frame gets another",
        "elements",
    ),
    Mutant(
        "plain-read-over-early",
        _DETACHED_IN_PLACE,
        _DETACHED_EARLY.replace("OPCODE", "kRead"),
        "a line that is prefetched without a command is readable before its bytes are there",
        "elements",
    ),
    Mutant(
        "staged-unsynchronised",
        "  // The copies of all lanes come before any lane's command, or its end of the"
        " write-back.\n  here.sync();\n",
        "",
        "a lane ends its write-back before its neighbours have copied their part of the line",
        "elements",
        "weak",
        4,
    ),
    Mutant(
        "pages-left-unseen-ahead",
        "    return read && !nvme::is_current(q, what.source) ? uint32_t(nvme::kCommandAborted)"
        " : status;\n",
        "    return status;\n",
        "so does a prefetch",
        "leases",
    ),
    Mutant(
        "pages-left-unfenced",
        "  // Acquire what the loads saw: see `nvme::is_current`.\n  atomic::fence_system();\n",
        "",
        "the second look at the path is served before the data that it is about",
        "leases",
        "weak",
    ),
    Mutant(
        "pages-left-unsynchronised",
        "  atomic::fence_system();\n  here.sync();\n}\n",
        "  atomic::fence_system();\n}\n",
        "a lane looks at the path before its neighbours have copied their part of its line",
        "leases",
        "weak",
        4,
    ),
)
