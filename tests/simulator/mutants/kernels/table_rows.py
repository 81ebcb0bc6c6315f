"""Mistakes in `flashwarp/kernels/table_rows.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/table_rows.cuh"

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
)
