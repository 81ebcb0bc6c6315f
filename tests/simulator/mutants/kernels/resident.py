"""Mistakes in `flashwarp/kernels/resident.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/resident.cuh"

MUTANTS = (
    Mutant(
        "client-no-second-look",
        "at[k].found && still_ours && cache::still_holds(g, at[k].way, at[k].word);",
        "at[k].found && still_ours;",
        "a client takes the bytes of a frame that the owner has refilled meanwhile",
        "clients",
    ),
    Mutant(
        "client-without-fence",
        "    atomic::fence_acquire();\n    here.sync();\n",
        "    here.sync();\n",
        "a client's second look comes before its loads, and does not see the refill",
        "clients",
        "weak",
    ),
    Mutant(
        "client-lists-for-one-lane",
        "{item, line - c.line_begin}",
        "{here.broadcast(item, leader), line - c.line_begin}",
        "a row that was not copied is not asked for, and another one twice",
        "clients",
        "sc",
        4,
    ),
)
