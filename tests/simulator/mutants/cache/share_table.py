"""Mistakes in `flashwarp/cache/share_table.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/share_table.cuh"

MUTANTS = (
    Mutant(
        "share-two-owners",
        "if (share_find(t, line).entry == kShareNowhere) {",
        "if (true) {",
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
        "share-overflow-missed",
        "    if (atomic::load_acquire(&t.overflows[bucket]) == 0) break;\n",
        "    break;\n",
        "a look ends at a full bucket, and misses the copy that lies in the next",
        "share_full",
    ),
    Mutant(
        "share-open-relaxed",
        "atomic::store_release(&t.words[entry],\n                        share::kShared",
        "atomic::store_relaxed(&t.words[entry],\n                        share::kShared",
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
    Mutant(
        "share-uncount-unfenced",
        "  // The same for threads that find a bucket's count at 0 and so look no further.\n"
        "  atomic::fence();\n",
        "",
        "a reader whose look ends at a bucket has not seen what was behind it written back",
        "share_full",
        "weak",
    ),
)
