"""Mistakes in `flashwarp/array/callers.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/array/callers.cuh"

MUTANTS = (
    Mutant(
        "arrays-mixed",
        "return warp::active().match(reinterpret_cast<uint64_t>(v));",
        "return (void)v, warp::active();",
        "lanes that mean different arrays share one queue's tickets",
        "elements",
        "sc",
        4,
    ),
)
