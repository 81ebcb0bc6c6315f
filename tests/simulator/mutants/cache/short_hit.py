"""Mistakes in `flashwarp/cache/short_hit.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/short_hit.cuh"

MUTANTS = (
    Mutant(
        "epoch-unlooked-by-residents",
        "!holds || epoch != 0",
        "!holds",
        "so does one of a few rows, which has a way of its own",
        "leases_replayed",
        "sc",
        4,
    ),
    Mutant(
        "residents-unvalidated",
        "!holds || epoch != 0",
        "epoch != 0",
        "a gather of a few rows keeps bytes of a frame that was refilled under it",
        "rows_resident",
        "sc",
        4,
    ),
    Mutant(
        "residents-unfenced",
        "  atomic::fence_acquire();\n  const bool holds = still_holds",
        "  const bool holds = still_holds",
        "so does its second look, if the loads may come after it",
        "rows_resident",
        "weak",
        4,
    ),
)
