"""Mistakes in `flashwarp/batch/host_regions.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/batch/host_regions.cuh"

MUTANTS = (
    Mutant(
        "rows-taken-relaxed",
        "atomic::load_acquire(&from.ready) != ticket",
        "atomic::load_relaxed(&from.ready) != ticket",
        "the engine reads the arguments before they are stored",
        "batches",
        "weak",
    ),
    Mutant(
        "rows-finished-relaxed",
        "atomic::store_release(&results[slot(taken)].done, taken.ready);",
        "atomic::store_relaxed(&results[slot(taken)].done, taken.ready);",
        "the end of a batch overtakes its rows",
        "batches",
        "weak",
    ),
)
