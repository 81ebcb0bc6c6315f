"""Mistakes in `flashwarp/nvme/submission_queue.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/nvme/submission_queue.cuh"

MUTANTS = (
    Mutant(
        "entry-after-mark",
        "  using word = atomic::raw<16>;\n",
        "  using word = atomic::raw<16>;\n"
        "  atomic::store_release(&q.slots[e],\n"
        "                        slot::word(turn_of(q, ticket), slot::kWritten) | flags);\n",
        "another warp rings for an entry that is not written yet",
        "queue",
    ),
    Mutant(
        "doorbell-device-fence",
        "        atomic::fence_system();\n        ring(q, q.sq_doorbell",
        "        atomic::fence();\n        ring(q, q.sq_doorbell",
        "a fence of the device does not order the entries for the controller",
        "queue",
        "weak",
    ),
    Mutant(
        "publish-without-second-look",
        "    if (count_publishable(q, here, tail + count) == 0) return;\n",
        "    return;\n",
        "an entry written while the lock was held is never published",
        "queue",
    ),
    Mutant(
        "publish-without-fence",
        "    atomic::fence_sequential();\n    if (count_publishable",
        "    if (count_publishable",
        "the second look overtakes the unlock, and misses an entry whose writer met the lock",
        "queue",
        "weak",
    ),
    Mutant(
        "ring-space-by-lane",
        "here.broadcast(atomic::load_relaxed(&q.fetched));",
        "atomic::load_relaxed(&q.fetched);",
        "lanes leave a loop of collectives at different times",
        "elements",
        "sc",
        4,
    ),
    Mutant(
        "leader-rings-unsynchronised",
        "    // Each lane has acquired the entries that it counted; the leader publishes all of"
        " them.\n    here.sync();\n",
        "",
        "the leader rings for entries that only its neighbours have acquired",
        "elements",
        "weak",
        4,
    ),
)
