"""Mistakes in `flashwarp/sampling.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/sampling.cuh"

MUTANTS = (
    Mutant(
        "vertex-placed-twice",
        "      if (key == kFree) key = atomic::load_relaxed(&keys[place]);\n",
        "",
        "a vertex gets two places if another thread enters it meanwhile",
        "sampling",
    ),
    Mutant(
        "vertex-of-a-later-slot",
        "    while (slot < before && !atomic::cas_acq_rel(&first[place], before, slot)) {\n"
        "      before = atomic::load_relaxed(&first[place]);\n"
        "    }\n",
        "    if (slot < before) atomic::store_relaxed(&first[place], slot);\n",
        "the number of a vertex depends on which thread comes last",
        "sampling",
    ),
    Mutant(
        "entry-drawn-twice",
        "    taken = lanes::all().any(taken);\n",
        "",
        "a lane does not know what the other lanes have drawn before",
        "sampling",
        width=4,
    ),
)
