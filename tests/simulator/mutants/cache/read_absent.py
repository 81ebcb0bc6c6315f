"""Mistakes in `flashwarp/cache/read_absent.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/read_absent.cuh"

_AROUND_COPY = """\
  if (arrived) op.template copy<warp::source::kStorage>(here, arrived, address - blocks.begin);
"""

_AROUND_CHECK = """\
  if (q.data.leased != 0) {
    finish_loads(here);
    // Also after a failure: the file may have been cut before the path changed.
    again = mine && status != nvme::kTimedOut && !nvme::is_current(q, address);
  }
"""

_AROUND_RELEASE = """\
  // The slot of a command that never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
"""

MUTANTS = (
    Mutant(
        "around-resident-lines",
        "if (pending) at = probe(g, line);",
        "",
        "a read around the cache misses what was stored to a frame and not written back",
        "files_around",
    ),
    Mutant(
        "around-slot-freed-early",
        _AROUND_COPY + _AROUND_CHECK + _AROUND_RELEASE,
        _AROUND_RELEASE + _AROUND_COPY + _AROUND_CHECK,
        "the next command's data replaces ours in the slot's buffer before we have read it",
        "loads_around",
        "weak",
    ),
    Mutant(
        "around-behind-the-lease",
        "out.ended = mine && nvme::is_current(q, q.data.mapped_base);",
        "out.ended = mine;",
        "pages that were read in place after the lease had ended pass for the file's",
        "leases_around",
    ),
    Mutant(
        "around-behind-the-lease-by-command",
        "again = mine && status != nvme::kTimedOut && !nvme::is_current(q, address);",
        "",
        "so do those of a command that was on its way then",
        "leases_around",
    ),
    Mutant(
        "around-unfenced",
        "if (q.data.leased != 0) finish_loads(here);",
        "",
        "the second look at the path is served before the bytes that it is about",
        "leases_around",
        "weak",
    ),
    Mutant(
        "around-on-paths-of-some-lanes",
        "const bool in_place = !here.any(path != nvme::kInPlace);",
        "const bool in_place = path == nvme::kInPlace;",
        "lanes of a warp that see the path change go two ways",
        "leases_around",
        "sc",
        4,
    ),
)
