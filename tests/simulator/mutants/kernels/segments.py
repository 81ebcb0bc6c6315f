"""Mistakes in `flashwarp/kernels/segments.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/segments.cuh"

MUTANTS = (
    Mutant(
        "prefetch-index-unchecked",
        "  if (row >= p.row_count) return {kNoRow, 0, 0, 0};\n",
        "",
        "an index out of bounds, or one that changes while a launch runs, is taken for a row",
        "deferral_prefetch",
    ),
)
