"""Mistakes in `flashwarp/file/file_calls.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/file/file_calls.cuh"

MUTANTS = (
    Mutant(
        "resident-lines-unserved",
        "wants && !served.mine()",
        "false",
        "a lane returns without its line, whose frame was refilled under it",
        "file_records",
        "sc",
        4,
    ),
    Mutant(
        "sync-of-one-lane",
        "status_of_all(here, wait_clean(c, v, here, s))",
        "wait_clean(c, v, here, s)",
        "lanes have different answers, and meet at different places",
        "files",
        "sc",
        4,
    ),
    Mutant(
        "share-by-another-mask",
        "base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, here, s)",
        "base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, active_on(f.bytes.volume), s)",
        "a lane returns before another one has written its share back",
        "files",
        "sc",
        4,
    ),
)
