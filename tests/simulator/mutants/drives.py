"""Mistakes in `benchmarks/drives/drives.cuh`."""

from simulator.mutant import Mutant

HEADER = "benchmarks/drives/drives.cuh"

MUTANTS = (
    Mutant(
        "window-keeps-slots",
        "      while (outstanding_ != 0) {\n",
        "      while (outstanding_ != 0 && p_.window == 1) {\n",
        "warps wait for slots that each other holds",
        "drives",
    ),
)
