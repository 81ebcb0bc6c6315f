"""Mistakes in `flashwarp/file/file_view.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/file/file_view.cuh"

MUTANTS = (
    Mutant(
        "append-in-two-steps",
        "    if (atomic::cas_acq_rel(&f.state->size, size, size + nbytes)) return int64_t(size);\n",
        "    atomic::store_relaxed(&f.state->size, size + nbytes);\n    return int64_t(size);\n",
        "two appends get the same place",
        "files",
    ),
    Mutant(
        "resident-lines-unserved",
        "wants && ((served >> warp::lane()) & 1) == 0",
        "false",
        "a lane returns without its line, whose frame was refilled under it",
        "file_records",
        "sc",
        4,
    ),
    Mutant(
        "end-behind-an-old-look",
        "    if (atomic::cas_acq_rel(&f.state->size, size, end)) return;\n",
        "    atomic::store_relaxed(&f.state->size, end);\n    return;\n",
        "a write that ends before another one's end takes the other's bytes from the file",
        "file_records",
    ),
    Mutant(
        "sync-of-one-lane",
        "status_of_all(mask, wait_clean(c, v, mask, s))",
        "wait_clean(c, v, mask, s)",
        "lanes have different answers, and meet at different places",
        "files",
        "sc",
        4,
    ),
    Mutant(
        "share-by-another-mask",
        "base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, mask, s)",
        "base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, active_on(f.bytes.volume), s)",
        "a lane returns before another one has written its share back",
        "files",
        "sc",
        4,
    ),
)
