"""Mistakes in `flashwarp/kernels/elements.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/elements.cuh"

MUTANTS = (
    Mutant(
        "epoch-unlooked-by-elements",
        "  cache::refresh(c, v, here);\n  for (uint64_t first = share.begin;",
        "  for (uint64_t first = share.begin;",
        "so does one of rows of a few elements",
        "leases_replayed",
        width=4,
    ),
)
