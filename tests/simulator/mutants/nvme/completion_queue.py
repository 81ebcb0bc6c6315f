"""Mistakes in `flashwarp/nvme/completion_queue.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/nvme/completion_queue.cuh"

MUTANTS = (
    Mutant(
        "phase-stays",
        "(turn_of(q, position) & 1) ^ 1",
        "1u",
        "completions of the second pass are never seen, those of the first twice",
        "queue",
    ),
    Mutant(
        "head-stays",
        "atomic::store_relaxed(&q.head, head + count);",
        "atomic::store_relaxed(&q.head, head);",
        "a completion is consumed twice",
        "queue",
    ),
    Mutant(
        "slots-waited-for-idly",
        """\
      return false;
    }
    help(q, here, finisher);
""",
        """\
      return false;
    }
    base::pause(kBackOffNs);
""",
        "threads that have all started more than the ring holds wait for each other's waits",
        "async",
    ),
    Mutant(
        "drain-leaves-entries",
        "  if (has_unpublished(q, here)) publish(q, here);\n",
        "",
        "an entry that waited for room in the ring is never published",
        "queue",
    ),
    Mutant(
        "unpublished-without-fence",
        "  atomic::fence_sequential();\n  const bool any",
        "  const bool any",
        "a drainer looks too early for an entry that waits for room, which is never published",
        "queue",
        mode="weak",
    ),
    Mutant(
        "drain-unsynchronised",
        "  // The leader has acquired what the last drainer did; no lane may see an entry of an"
        " older pass.\n  here.sync();\n",
        "",
        "a lane takes a completion of two passes before for a new one",
        "queue",
        "weak",
        4,
    ),
    Mutant(
        "doorbell-before-loads",
        "    here.sync();\n    // The controller's data comes before",
        "    // The controller's data comes before",
        "the controller may overwrite a completion that a lane beside the leader still loads",
        "queue",
        "weak",
        4,
    ),
)
