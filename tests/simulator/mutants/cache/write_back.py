"""Mistakes in `flashwarp/cache/write_back.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/write_back.cuh"

MUTANTS = (
    Mutant(
        "write-back-unannounced",
        "const bool visits = !same_array(*v, self);",
        "const bool visits = false;",
        "a neighbour frees its rings while a warp has just written its dirty line back",
        "neighbour_closes",
        strategy="random",
    ),
    Mutant(
        "fills-unswept",
        "    if (pending && (tag::state_of(word) == tag::kInvalid || line",
        "    if (pending && (tag::state_of(word) != tag::kValid || line",
        "a fill that began before the epoch is published after the sweep",
        "leases_replayed",
    ),
)
