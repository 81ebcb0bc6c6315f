"""Mistakes in `flashwarp/array/view.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/array/view.cuh"

MUTANTS = (
    Mutant(
        "load-without-acquire",
        "value = atomic::raw<kAccessBytes>::load_acquire_stream(frame + offset_of(i));",
        "value = atomic::raw<kAccessBytes>::load(frame + offset_of(i));",
        "the second look at the tag overtakes the load, and a refill goes unnoticed",
        "evict",
        "weak",
    ),
    Mutant(
        "no-second-look",
        "      hit = fw::cache::still_holds(geometry, at.way, at.word);\n"
        "      if (hit) policy::on_hit",
        "      hit = true;\n      if (hit) policy::on_hit",
        "a frame refilled during the load yields another line's bytes",
        "elements",
        strategy="random",
    ),
)
