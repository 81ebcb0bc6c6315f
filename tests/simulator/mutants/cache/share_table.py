"""Mistakes in `flashwarp/cache/share_table.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/share_table.cuh"

MUTANTS = (
    Mutant(
        "share-two-owners",
        "if (share_find(t, line).entry == kShareNowhere) return true;",
        "return true;",
        "two threads make their buffers the copy of one line",
        "share",
    ),
    Mutant(
        "share-closing-joined",
        "!patient && share::references(word) != 0 &&",
        "!patient &&",
        "a user joins a copy that its owner has taken back",
        "share",
    ),
    Mutant(
        "share-stores-forgotten",
        "| (stored ? share::kModified : 0);\n      });\n}\n\n// Makes the owner's",
        ";\n      });\n}\n\n// Makes the owner's",
        "what users stored to an owner's buffer never reaches the cache",
        "share",
    ),
    Mutant(
        "share-claim-relaxed",
        "atomic::store_release(&t.words[entry], share::kFilling | line);",
        "atomic::store_relaxed(&t.words[entry], share::kFilling | line);",
        "a reader finds a copy that is being filled, and the cache as it was before the last one",
        "share",
        "weak",
        4,
        strategy="round-robin",
    ),
    Mutant(
        "share-open-relaxed",
        "atomic::store_release(&t.words[entry], share::kShared",
        "atomic::store_relaxed(&t.words[entry], share::kShared",
        "a user finds a buffer before its bytes",
        "share",
        "weak",
    ),
    Mutant(
        "share-end-relaxed",
        "atomic::store_release(&t.words[entry], share::kFree);",
        "atomic::store_relaxed(&t.words[entry], share::kFree);",
        "a reader finds no copy, and the cache as it was before the copy was written back",
        "share",
        "weak",
    ),
)
