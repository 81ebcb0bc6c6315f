"""Mistakes in `flashwarp/kernels/update.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/update.cuh"

MUTANTS = (
    Mutant(
        "update-unpinned",
        "static constexpr bool kStores = true;",
        "static constexpr bool kStores = false;",
        "a row is updated in a frame that is not dirty, or that another line gets meanwhile",
        "updates",
    ),
    Mutant(
        "update-unsynchronised",
        "    // Each lane has acquired its own line; now all lanes use all of them.\n"
        "    here.sync();\n",
        "",
        "lanes update a row in a line whose fill only a neighbour has acquired",
        "updates",
        "weak",
        4,
    ),
    Mutant(
        "update-of-each-place",
        "(first == 0 || ids[first - 1] != ids[first])",
        "true",
        "a row whose id repeats is updated again, by what no chunk has added up",
        "updates",
    ),
)
