"""Mistakes in `flashwarp/kernels/table.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/table.cuh"

MUTANTS = (
    Mutant(
        "lookup-no-second-look",
        "if (!f.usable || !cache::still_holds(t.geometry, f.first.way, f.first.word))",
        "if (!f.usable)",
        "a row whose frame was refilled while it was converted is another row's",
        "lookups",
        "sc",
        4,
    ),
    Mutant(
        "lookup-without-fence",
        "      atomic::fence_acquire();\n      here.sync();\n      const lanes good",
        "      here.sync();\n      const lanes good",
        "the second look overtakes the loads of a row, and a refill goes unnoticed",
        "lookups",
        "weak",
        4,
    ),
    Mutant(
        "lookup-unsynchronised",
        "    here.sync();\n    for (uint32_t q = 0;",
        "    for (uint32_t q = 0;",
        "lanes load from a line whose fill only a neighbour has acquired",
        "lookups",
        "weak",
        4,
    ),
)
