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
        "end-behind-an-old-look",
        "    if (atomic::cas_acq_rel(&f.state->size, size, end)) return;\n",
        "    atomic::store_relaxed(&f.state->size, end);\n    return;\n",
        "a write that ends before another one's end takes the other's bytes from the file",
        "file_records",
    ),
)
