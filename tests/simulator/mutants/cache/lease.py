"""Mistakes in `flashwarp/cache/lease.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/lease.cuh"

MUTANTS = (
    Mutant(
        "sweep-unwaited",
        "    // Other warps have the rest.\n",
        "    break;\n",
        "a warp goes on while others are yet to empty frames that it may hit",
        "leases_replayed",
    ),
    Mutant(
        "sweep-counted-early",
        "      if (!here.any(!sweep_chunk(c, v, here, chunk))) {\n",
        "      if (leads && take_number(&l.done, epoch, chunks) == chunks - 1) {\n"
        "        note_swept(l, epoch);\n"
        "      }\n"
        "      if (!here.any(!sweep_chunk(c, v, here, chunk))) {\n",
        "a sweep is over before its last frames are empty",
        "leases_replayed",
    ),
    Mutant(
        "sweep-once",
        "counts_for == epoch ? uint32_t(seen) : 0;",
        "uint32_t(seen);",
        "the sweep of a second epoch finds all chunks taken by that of the first",
        "leases_replayed",
    ),
    Mutant(
        "sweep-unsynchronised",
        "        // All lanes have emptied their frames before the leader says so.\n"
        "        here.sync();\n",
        "",
        "a frame that a neighbour's lane has emptied is hit after the sweep",
        "leases_replayed",
        "weak",
        4,
    ),
    Mutant(
        "swept-relaxed",
        "is_before(atomic::load_acquire(&l.swept), epoch)",
        "is_before(atomic::load_relaxed(&l.swept), epoch)",
        "a warp that has not swept still hits frames that others have emptied",
        "leases_replayed",
        "weak",
    ),
)
