"""Mistakes in `flashwarp/kernels/table.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/table.cuh"

MUTANTS = (
    Mutant(
        "lookup-without-fence",
        "        atomic::fence_acquire();\n        here_.sync();\n        const lanes good",
        "        here_.sync();\n        const lanes good",
        "the second look overtakes the loads of a row, and a refill goes unnoticed",
        "lookups",
        "weak",
        4,
    ),
    Mutant(
        "lookup-unsynchronised",
        "      here_.sync();\n      for (uint32_t q = 0;",
        "      for (uint32_t q = 0;",
        "lanes load from a line whose fill only a neighbour has acquired",
        "lookups",
        "weak",
        4,
    ),
)
