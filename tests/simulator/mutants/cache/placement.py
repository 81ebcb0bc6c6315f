"""Mistakes in `flashwarp/cache/placement.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/placement.cuh"

MUTANTS = (
    Mutant(
        "replica-failure-forgotten",
        "const uint32_t all = worse_of(seen >> 16, status);",
        "const uint32_t all = status;",
        "a write-back that failed on one replica leaves the line clean",
        "replicate_faults",
    ),
    Mutant(
        "seat-by-lane",
        "  return here.broadcast(warp::index() + base::spread_index());\n",
        "  return (void)here, warp::index() + base::spread_index();\n",
        "lanes that have asked at different times submit to different rings as one",
        "elements",
        "sc",
        4,
    ),
)
