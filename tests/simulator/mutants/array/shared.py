"""Mistakes in `flashwarp/array/shared.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/array/shared.cuh"

MUTANTS = (
    Mutant(
        "share-patience-endless",
        "attempt(waits && looks < kSharePatience);",
        "attempt(waits);",
        "threads that hold a line each wait for the owners of each other's",
        "share",
        width=4,
    ),
    Mutant(
        "share-users-forgotten",
        "held.owner && cache::share::references(word) == 0;",
        "held.owner;",
        "an owner takes its buffer back while others store to it",
        "share",
    ),
    Mutant(
        "share-closing-missed",
        "cache::share::state_of(at.word) == cache::share::kFilling;",
        "cache::share::state_of(at.word) != cache::share::kShared;",
        "a reader takes the cache's old bytes while a copy is being written back",
        "share",
    ),
    Mutant(
        "share-block-forgotten",
        "if (copy.scope == 0 || copy.scope == base::own_scope()) return copy.buffer;",
        "return copy.buffer;",
        "a thread takes an address in another block's shared memory for its own",
        "share",
    ),
    Mutant(
        "share-store-unguarded",
        "  const uint32_t stored = access_frame(c, v, here, {line, locked}",
        "  if (locked) cache::share_unlock(t, line);\n"
        "  const uint32_t stored = access_frame(c, v, here, {line, locked}",
        "a line is brought to a buffer while its cached bytes are stored to",
        "share",
    ),
    Mutant(
        "share-users-unsynchronised",
        "  // The loads and stores of all lanes come before the release by one lane for all.\n"
        "  here.sync();\n",
        "",
        "a lane lets go of a copy for lanes whose stores are still on their way",
        "share",
        "weak",
        4,
    ),
)
