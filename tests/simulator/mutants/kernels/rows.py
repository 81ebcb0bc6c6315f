"""Mistakes in `flashwarp/kernels/rows.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/rows.cuh"

MUTANTS = (
    Mutant(
        "epoch-unlooked",
        "  cache::refresh(c, v, here);\n  for (uint64_t first = mine.begin;",
        "  for (uint64_t first = mine.begin;",
        "a replay serves lines of the file from before a writer came",
        "leases_replayed",
        width=4,
    ),
    Mutant(
        "epoch-unlooked-by-threads",
        "  cache::refresh(c, v, here);\n  // Segments in a row",
        "  // Segments in a row",
        "so does one of the CPU device, whose threads take segments by themselves",
        "leases_replayed",
    ),
)
