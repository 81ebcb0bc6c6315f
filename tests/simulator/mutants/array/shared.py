"""Mistakes in `flashwarp/array/shared.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/array/shared.cuh"

MUTANTS = (
    Mutant(
        "share-patience-endless",
        "return looks_ < kSharePatience;",
        "return true;",
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
        "cache::share::state_of(at.word) == cache::share::kFilling) {",
        "cache::share::state_of(at.word) != cache::share::kShared) {",
        "a reader takes the cache's old bytes while a copy is being written back",
        "share",
    ),
    Mutant(
        "share-block-forgotten",
        "if (scope == 0 || scope == base::own_scope()) return {share_result::kJoined",
        "if (scope != ~0u) return {share_result::kJoined",
        "a thread takes an address in another block's shared memory for its own",
        "share",
    ),
    Mutant(
        "share-store-unguarded",
        """\
  if (here.any(claimed)) {
    store_element<kBytes> op = element;
""",
        """\
  if (claimed) cache::share_end(t, mine.entry, line);
  if (here.any(claimed)) {
    store_element<kBytes> op = element;
""",
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
