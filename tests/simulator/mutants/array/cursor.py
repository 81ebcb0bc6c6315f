"""Mistakes in `flashwarp/array/cursor.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/array/cursor.cuh"

MUTANTS = (
    Mutant(
        "cursor-without-acquire",
        "value = atomic::raw<kAccessBytes>::load_acquire(address_of(i));",
        "value = atomic::raw<kAccessBytes>::load(address_of(i));",
        "the second look at the tag overtakes the load, and a refill goes unnoticed",
        "cursors",
        "weak",
        strategy="rival",
    ),
    Mutant(
        "cursor-no-second-look",
        "    atomic::fence_acquire();\n    return still_held();",
        "    atomic::fence_acquire();\n    return true;",
        "a frame refilled since the cursor found its line yields another line's bytes",
        "cursors",
    ),
    Mutant(
        "cursor-line-left-unlooked",
        "      if (!still_held()) return false;",
        "",
        "of elements on several lines, those of the first may be another line's",
        "cursors",
    ),
    Mutant(
        "cursor-bundle-without-fence",
        "    atomic::fence_acquire();\n    return still_held();",
        "    return still_held();",
        "the second look overtakes the loads of a bundle, and a refill goes unnoticed",
        "loops",
        "weak",
    ),
    Mutant(
        "row-no-second-look",
        "same = word_ != 0 && still_held();",
        "same = word_ != 0;",
        "a bundle on several lines, of which one was refilled meanwhile, is handed out",
        "loops",
        "sc",
        4,
    ),
    Mutant(
        "row-in-any-order",
        "part.begin <= first && first <= last && last <= part.end",
        "part.begin <= first && last <= part.end",
        "a lane's elements lie before the lines that the warp has found for it",
        "loops",
        "sc",
        4,
    ),
    Mutant(
        "row-found-unsynchronised",
        "    // Each lane has acquired the fill of its own line, and loads from all of them.\n"
        "    all.sync();\n",
        "",
        "lanes load from a line whose fill only a neighbour has acquired",
        "loops",
        "weak",
        4,
    ),
)
