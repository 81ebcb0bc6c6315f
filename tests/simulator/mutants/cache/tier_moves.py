"""Mistakes in `flashwarp/cache/tier_moves.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/tier_moves.cuh"

MUTANTS = (
    Mutant(
        "tier-copy-stays",
        "tier::change(c.tier, mine.tier_from, tier::kEmpty);",
        "tier::change(c.tier, mine.tier_from, tier::kHeld);",
        "the tier goes on holding a line that may now be stored to",
        "tier",
    ),
)
