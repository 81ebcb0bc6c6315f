"""Mistakes in `flashwarp/cache/visits.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/visits.cuh"

MUTANTS = (
    Mutant(
        "own-volume-only",
        "  if ((step & 3) != 3) return v;\n",
        "  return v;\n",
        "a frame that another array's queue fills is waited for in vain",
        "foreign",
    ),
    Mutant(
        "visit-unannounced",
        "    if (ours || begin_visit(target)) {\n      if (!ours) visited = &target;\n",
        "    if (ours || atomic::load_acquire(&target.attached) != 0) {\n",
        "a neighbour frees its rings while a warp that waits helps them",
        "neighbour_closes",
    ),
    Mutant(
        "visit-looks-first",
        "  atomic::add_relaxed(&v.visitors, 1u);\n",
        "  const bool there = atomic::load_acquire(&v.attached) != 0;\n"
        "  atomic::add_relaxed(&v.visitors, 1u);\n"
        "  if (there) return true;\n",
        "the neighbour closes between the look and the announcement",
        "neighbour_closes",
    ),
    Mutant(
        "visit-without-fence",
        "  atomic::fence_sequential();\n",
        "",
        "the look overtakes the announcement: visitor and host miss each other",
        "neighbour_closes",
        "weak",
    ),
    Mutant(
        "help-by-lane",
        "  queue = here.broadcast(queue);\n",
        "  queue = reinterpret_cast<uint64_t>(&queue_to_help(v, step));\n",
        "lanes that have asked at different times help different rings as one",
        "elements",
        "sc",
        4,
    ),
)
