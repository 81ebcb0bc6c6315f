"""Mistakes in `flashwarp/cache/transfer.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/transfer.cuh"

MUTANTS = (
    Mutant(
        "pages-left-unseen",
        "    members |= end_lines(c, v, q, here, bundle, opcode, t, ticket, address, got);\n",
        "    end_lines(c, v, q, here, bundle, opcode, t, ticket, address, got);\n",
        "a fill that was read in place after the lease had ended passes for current",
        "leases",
    ),
)
