"""Mistakes in `flashwarp/cache/host_tier.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/host_tier.cuh"

MUTANTS = (
    Mutant(
        "held-relaxed",
        "  atomic::store_release(&t.tags[place],\n",
        "  atomic::store_relaxed(&t.tags[place],\n",
        "a line is taken out of the tier before its bytes are there",
        "tier",
        "weak",
    ),
)
