"""Mistakes in `flashwarp/cache/transfer.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/transfer.cuh"

MUTANTS = (
    Mutant(
        "pages-left-unseen",
        "    members |= end_lines(r, got);\n",
        "    end_lines(r, got);\n",
        "a fill that was read in place after the lease had ended passes for current",
        "leases",
    ),
)
