"""Mistakes in `flashwarp/cache/access.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/access.cuh"

MUTANTS = (
    Mutant(
        "hits-no-second-look",
        "const bool served = usable && still_holds(g, at.way, at.word);",
        "const bool served = usable;",
        "a row whose frame was refilled during the copy is another line's",
        "rows",
        "sc",
        4,
    ),
    Mutant(
        "hits-without-fence",
        "    atomic::fence_acquire();\n    here.sync();\n",
        "    here.sync();\n",
        "the second look overtakes the loads of a row, and a refill goes unnoticed",
        "rows",
        "weak",
        4,
    ),
    Mutant(
        "hits-unsynchronised",
        "    atomic::fence_acquire();\n    here.sync();\n",
        "    atomic::fence_acquire();\n",
        "a lane's second look comes before its neighbours have loaded their part of its row",
        "rows",
        "weak",
        4,
        strategy="rival",
    ),
    Mutant(
        "late-fill-frees-frame",
        "if (!outstanding) abandon_fill",
        "if (status != 0) abandon_fill",
        "a fill that ran out of time writes over the line that got its frame",
        "faults",
        strategy="priority",
    ),
    Mutant(
        "pages-left-unseen-inline",
        "    left = read_frames(*source.queue,",
        "    left = {};\n    read_frames(*source.queue,",
        "so does a fill of a thread that waits for it",
        "leases",
    ),
    Mutant(
        "plain-source-of-some-lanes",
        "  if (!by.here.any(!source.open)) {\n",
        "  if (source.open) {\n",
        "lanes of a warp that see the path change go two ways",
        "leases",
        width=4,
    ),
    Mutant(
        "passed-line-not-waited-for",
        "const uint32_t status = move_lines(c, v, here, members, nvme::kWrite, t);",
        "uint32_t status = 0;\n  move_lines_detached(c, v, here, members, nvme::kWrite, t);",
        "a line that is written around the cache loses its frame before it is written",
        "files_passed",
    ),
    Mutant(
        "passed-line-kept",
        "if (!kPasses) publish_fill(c, mine.way, mine.word, Op::kStores);",
        "publish_fill(c, mine.way, mine.word, Op::kStores);",
        "others find, store to and evict a line that passes through a frame",
        "stores_around",
    ),
)
