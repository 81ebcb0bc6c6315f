"""Mistakes in `flashwarp/base/copy.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/base/copy.cuh"

MUTANTS = (
    Mutant(
        "elements-in-halves",
        "  if (all % 8 == 0) {\n",
        "  if (false) {\n",
        "a gathered element has parts of two stores",
        "rows",
        "sc",
        4,
    ),
)
