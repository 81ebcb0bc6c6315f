"""Mistakes in `flashwarp/cache/line_state.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/line_state.cuh"

MUTANTS = (
    Mutant(
        "pins-ignored",
        "return (word & (kStateMask | kPinMask | kDirty | kWriting)) == kValid;",
        "return (word & (kStateMask | kDirty | kWriting)) == kValid;",
        "a line is evicted under a store to it",
        "elements",
    ),
    Mutant(
        "generation-stays",
        "((previous + kGenerationOne) & kGenerationMask)",
        "(previous & kGenerationMask)",
        "a line that left its frame and came back looks as if it had never left",
        "evict",
    ),
    Mutant(
        "store-not-dirty",
        "(w - tag::kPinOne) | (dirty ? tag::kDirty : 0)",
        "(void(dirty), w - tag::kPinOne)",
        "a store is never written back",
        "elements",
    ),
    Mutant(
        "failed-write-clean",
        "(succeeded ? 0 : tag::kDirty)",
        "(succeeded ? 0 : 0)",
        "a write-back that failed leaves the line clean, and its stores are lost",
        "faults",
    ),
)
