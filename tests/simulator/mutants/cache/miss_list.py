"""Mistakes in `flashwarp/cache/miss_list.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/miss_list.cuh"

MUTANTS = (
    Mutant(
        "misses-of-any-launch",
        "    if (list_state::launch(seen) != launch) return false;\n",
        "    if (list_state::launch(seen) != launch) launch = list_state::launch(seen);\n",
        "blocks of one launch take the items of another for their own",
        "deferral",
    ),
    Mutant(
        "misses-without-reserve",
        "      if (tail - head + others <= uint64_t(1) << m.capacity_log2) {\n",
        "      if (tail - head <= uint64_t(1) << m.capacity_log2) {\n",
        "warps that append together overwrite entries that nobody has taken",
        "deferral",
    ),
    Mutant(
        "misses-of-the-last-turn",
        "uint32_t(entry >> 32) == turn_of(m, ticket) &&",
        "entry != 0 &&",
        "an entry of the ring's last turn is taken for the one that is about to be stored",
        "deferral",
    ),
    Mutant(
        "misses-taken-twice",
        "ours = atomic::cas_relaxed(&m.head, head, head + count);",
        "ours = atomic::add_relaxed(&m.head, uint64_t(count)) != ~uint64_t(0);",
        "two warps take the same entries, and skip as many",
        "deferral",
    ),
    Mutant(
        "misses-left-unmarked",
        "behind = left | list_state::kLeftBehind;",
        "behind = left;",
        "a block leaves although another has appended and left since it found the list empty",
        "deferral",
        "weak",
    ),
    Mutant(
        "misses-mark-unacquired",
        "        atomic::cas_acq_rel(&m.state, seen, seen & ~list_state::kLeftBehind);\n"
        "        continue;\n",
        "",
        "the block that entries are left to does not see them, and leaves too",
        "deferral",
        "weak",
    ),
    Mutant(
        "misses-undrained",
        "    if (drains) return at_end::kDrains;\n",
        "    if (drains) return at_end::kLeaves;\n",
        "a block that drains leaves before the list is empty",
        "deferral",
        "weak",
    ),
    Mutant(
        "misses-taken-late",
        "    block::sync();\n",
        "",
        "a warp still takes misses after another has left for its block: another launch's",
        "deferral_blocks",
        "sc",
        4,
        "random",
    ),
)
